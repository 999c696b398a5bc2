"""The placement problem as numbers (entities, choices, edges), and decoding of its solution."""

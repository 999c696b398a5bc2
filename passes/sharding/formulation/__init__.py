"""The placement problem as numbers: entities, choices, edges; and its solution as a decision."""

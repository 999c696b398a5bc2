"""Placements of every value: from a placement graph to the numbers that are solved, and back to a decision."""

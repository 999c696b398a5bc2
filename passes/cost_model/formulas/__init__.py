"""Costs and sizes as formulas in the sizes of a model's inputs and of the mesh."""

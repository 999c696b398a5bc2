"""Pipeline stages of a graph: their boundaries, their costs and their plan."""

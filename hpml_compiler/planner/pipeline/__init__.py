"""Pipeline stages of a graph: the cut, their costs and their plan."""

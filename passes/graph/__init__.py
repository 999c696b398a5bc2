"""Data about a graph: values and operations, layouts, the signature, the decision."""

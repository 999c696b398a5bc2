"""What the passes say about a graph: values and operations, layouts, the interface, the decision."""

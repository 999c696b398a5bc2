"""Passes that change the graph, one per file. They apply the decisions in annotations and make none."""

"""Passes that change the graph, one per file. They carry out what annotations say and decide nothing."""

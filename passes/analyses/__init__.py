"""Passes that write annotations about the graph, one per file: the keys stand beside the pass that provides them."""

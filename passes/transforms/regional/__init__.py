"""Equal regions of a graph, cut out so that each is compiled once."""

"""Regional compilation: equal regions of a graph are cut out and compiled once."""

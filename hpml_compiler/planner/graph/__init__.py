"""Planning of one graph: the passes that decide, its measured costs, its share of the memory budget, its microbatches."""

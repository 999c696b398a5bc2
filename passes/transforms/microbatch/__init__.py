"""The split of a graph into prologue, microbatch loop and epilogue."""

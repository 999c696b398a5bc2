"""One step of a compiled graph: the loop over microbatches, and the stages of a pipeline with their messages."""

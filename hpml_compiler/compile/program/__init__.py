"""The program that one rank runs: the loop over microbatches and the stages of a pipeline, compiled."""

"""Compilation of one Dynamo graph of the backend: inputs, cache, trace, decide, rewrite, split, lower, install, run."""

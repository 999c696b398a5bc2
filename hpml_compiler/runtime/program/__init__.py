"""Execution of one step: the microbatch loop, pipeline stages and their sends."""

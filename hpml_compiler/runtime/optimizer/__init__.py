"""Optimizer steps on sharded parameters, offloaded optimizer state, and memory of parameters, gradients and state."""

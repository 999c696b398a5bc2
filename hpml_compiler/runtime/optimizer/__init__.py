"""Optimizer steps on sharded parameters, state that is offloaded, and the bytes that live from step to step."""

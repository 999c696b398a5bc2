"""Checks and broadcasts that keep graphs, inputs, parameters and random numbers equal on all ranks."""

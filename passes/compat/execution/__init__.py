"""Eager execution: autograd, DTensor, process groups, pipeline schedules."""

"""Transforms of what a graph returns."""

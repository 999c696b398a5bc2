"""Rewrite of a whole graph into the graph of one rank (SPMD)."""

"""Rewrites that keep a graph's meaning: normal form, common subexpressions, aliases, memory formats."""

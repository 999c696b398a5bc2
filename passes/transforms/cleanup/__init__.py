"""Semantics-preserving rewrites: normal form, common subexpressions, aliases, memory formats."""

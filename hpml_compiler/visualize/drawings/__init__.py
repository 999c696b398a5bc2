"""Drawings of a plan with Graphviz: overview, one block, all operators."""

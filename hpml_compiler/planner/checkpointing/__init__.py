"""Activation checkpointing under a memory budget: the choice, its cache, and its record in the plan."""

"""Activation checkpointing: which values forward saves for backward, and which are recomputed or offloaded, under a byte
budget.

The search is on plain numbers, a `StorageProgram`, and every answer is checked by simulating its memory.
"""

"""Repeat calls of compiled graphs that ran out of memory, under plans that take less."""

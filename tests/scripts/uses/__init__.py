"""Families of uses, a module each. See `tests.scripts.use`."""

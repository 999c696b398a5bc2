"""Graphs and plain data as bytes for another process, and fingerprints of external passes and rules for cache keys."""

"""Persistent SQLite caches: the plan cache (text) and the graph cache (bytes)."""

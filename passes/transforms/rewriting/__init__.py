"""Insertion of calls with fake values and provenance, shared by all transforms."""

"""Insertion of calls with fake values and provenance, which all transforms share."""

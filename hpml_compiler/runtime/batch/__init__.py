"""Batches of which each rank holds some rows."""

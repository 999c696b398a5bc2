"""Batches that are sharded by rows over the ranks."""

"""Bucketing and prefetching of collectives."""

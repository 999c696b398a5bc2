"""Discover the cluster that a process runs on."""

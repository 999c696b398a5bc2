"""Dynamo: capture, sources of graph inputs, and symbolic sizes."""

"""Dynamo: what it captures, the sources of graph inputs, and symbolic sizes."""

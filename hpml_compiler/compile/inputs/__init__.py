"""Inputs of a Dynamo graph: which are parameters, shards or rows of a batch, on which mesh, and which graphs are not
supported."""

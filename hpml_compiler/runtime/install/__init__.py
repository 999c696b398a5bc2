"""Sharded parameters put in the place of a model's own while Dynamo compiles it."""

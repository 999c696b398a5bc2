"""Replace a model's parameters by sharded ones while Dynamo compiles it."""

"""The joint graph of a training step from a model and a batch, without running it."""

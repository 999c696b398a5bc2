"""From a model and a batch to the joint graph of a training step, without running it."""

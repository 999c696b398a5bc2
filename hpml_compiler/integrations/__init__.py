"""Libraries that bring the training loop: accelerate, transformers' Trainer, Lightning. Each is imported only if it is used."""

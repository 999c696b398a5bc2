"""Checkpoints of a training run: what is saved, how files are written and verified, and the way back."""

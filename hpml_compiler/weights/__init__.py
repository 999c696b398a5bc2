"""Whole models that no host holds: made from the meta device, loaded and saved a tensor at a time."""

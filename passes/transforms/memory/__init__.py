"""Rematerialization and offloading of activations."""

"""Replaced functions of torch, and the releases that hpml is tested with."""

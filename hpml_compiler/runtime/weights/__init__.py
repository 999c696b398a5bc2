"""Weights in safetensors files: written as streams, read by slices."""

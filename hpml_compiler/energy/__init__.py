"""Measured energy and power of this machine's devices."""

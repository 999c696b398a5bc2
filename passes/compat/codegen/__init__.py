"""Inductor: lowering, C++ kernels and kernel order."""

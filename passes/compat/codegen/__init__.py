"""Inductor: lowering, its C++ kernels and its order of kernels."""

"""The cost terms of operations, redistributions and parameters."""

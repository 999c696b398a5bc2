"""Lowering of a rewritten graph to compiled code, through inductor."""

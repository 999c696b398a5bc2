"""Sharding rules of operators, one file per family; tests/passes/op_rules runs every rule sharded and unsharded."""

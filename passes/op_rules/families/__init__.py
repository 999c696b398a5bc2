"""Operator rules, one file per family; tests/passes/op_rules runs every rule sharded and whole."""

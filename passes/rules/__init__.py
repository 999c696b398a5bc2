"""The table of op rules, a family of operators per file; every rule is run, sharded and whole, in tests/passes/rules."""

"""Groups of operations that choose one strategy together, and groups that are equal."""

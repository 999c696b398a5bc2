"""The plan as data: its records, its JSON, and the sums over them. Nothing here draws."""

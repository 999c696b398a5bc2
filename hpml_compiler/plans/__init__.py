"""The plan as data: its records, its JSON and totals over a step. Nothing here draws."""

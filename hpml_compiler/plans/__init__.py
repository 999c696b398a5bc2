"""The plan as data: its parts, its files, and how it is written from a decision."""

"""The memory of one joint graph: its operations and storages, and the bytes held at every operation."""

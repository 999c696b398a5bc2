"""Memory of one joint graph: its operations and storages, and the bytes in memory at every operation."""

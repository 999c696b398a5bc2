"""State of one process: the mesh in use, the plans made on it, the optimizer found, the monitor."""

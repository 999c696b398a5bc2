"""State of one process: device mesh, plans, optimizer lookup and monitor."""

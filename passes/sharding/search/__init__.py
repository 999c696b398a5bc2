"""Search for the cheapest placements over meshes, and the passes that run it."""

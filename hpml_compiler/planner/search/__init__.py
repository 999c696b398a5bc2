"""Search for a plan that fits: the plan cache, dry runs, and placements under a memory budget."""

"""A step's loop over microbatches as data: its parts, and the order in which they run."""

"""The cost and bytes of a decision, recomputed on the unfolded graph by code that shares nothing with the problem."""

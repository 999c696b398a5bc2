"""Plans for heterogeneous clusters: groups of different devices get different shares of the batch."""

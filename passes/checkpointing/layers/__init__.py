"""Equal layers of a storage program: folded, unfolded, and deciding alike."""

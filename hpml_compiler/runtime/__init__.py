"""What runs: parameters and batches that live on several ranks, and the compiled graphs that use them."""

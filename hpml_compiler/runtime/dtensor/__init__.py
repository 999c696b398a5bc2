"""`PlacedTensor`, the DTensor that a script may use as the whole tensor, and how each torch function treats it."""

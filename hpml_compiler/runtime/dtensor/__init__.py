"""`PlacedTensor`, a DTensor that scripts may use as the full tensor, and its dispatch of torch functions."""

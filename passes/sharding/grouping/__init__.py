"""Groups of operations that choose one strategy together, and classes of equal groups."""

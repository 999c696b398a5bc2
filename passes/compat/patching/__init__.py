"""Functions of torch that hpml replaces, and the releases that it is tested with."""

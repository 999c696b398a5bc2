"""The table of operator rules, and what follows from an operator alone: views, randomness, opaque calls."""

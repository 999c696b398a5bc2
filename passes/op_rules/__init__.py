"""Table of operator rules, and properties of operators: views, randomness, opaque calls."""

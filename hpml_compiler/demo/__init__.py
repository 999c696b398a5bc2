"""What `hpml demo` runs: an ordinary training script with its text, and the code that starts it and compares runs."""

"""Trade-offs between time and energy: plans under power caps, and their Pareto front."""

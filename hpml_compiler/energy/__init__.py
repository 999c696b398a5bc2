"""Energy: measured where a meter exists (`meters`), and weighed against time (`pareto`, `sweep`)."""

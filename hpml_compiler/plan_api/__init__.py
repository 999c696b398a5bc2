"""Public plan classes: `Plan` and `MixedPlan`, with methods to draw, explain and compare plans."""

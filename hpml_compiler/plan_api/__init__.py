"""Plans as users have them: `Plan` and `MixedPlan`, with methods that draw, explain and compare them."""

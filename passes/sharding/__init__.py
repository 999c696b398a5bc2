"""Choose the placement of every value: build the problem from a placement graph, solve it, decode the decision."""

"""From a model, or a traced graph, to its plan."""

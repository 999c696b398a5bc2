"""Planning of a model, or of a traced graph."""

"""Split of a joint graph into pipeline stages, and of backward into input and weight gradients."""

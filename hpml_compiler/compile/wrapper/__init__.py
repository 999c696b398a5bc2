"""Runtime wrappers, which a script calls in place of a graph, and the runtime metadata they need."""

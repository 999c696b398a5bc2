"""AOTAutograd: tracing a joint graph, its decompositions, and what is done around the compiled graphs."""

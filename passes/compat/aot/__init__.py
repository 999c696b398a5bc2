"""AOTAutograd: tracing of a joint graph, decompositions, and the epilogue around the compiled graphs."""

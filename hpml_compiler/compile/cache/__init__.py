"""Persistent cache of rewritten graphs: its key, the stub graph that AOTAutograd traces instead, and plans made on demand."""

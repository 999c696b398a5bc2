"""Whether a value that forward makes is kept for backward or computed once more, so that a step fits its memory.

In plain numbers: a `Tape` (what a joint graph runs and which memory it takes), a `walk` along it that counts bytes, and
`keep`, which chooses what is saved at the least cost in time under a number of bytes.
"""

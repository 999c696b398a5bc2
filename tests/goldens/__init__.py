"""Compiled graphs and communication of uses, recorded on one commit and compared on another: `python -m tests.goldens`."""

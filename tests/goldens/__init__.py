"""What a use is compiled to and communicates, recorded on one commit and compared on another: `python -m tests.goldens`."""

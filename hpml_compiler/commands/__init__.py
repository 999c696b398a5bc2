"""Subcommands of `hpml`, a file each. A module here exposes `register(app)`; names with a leading `_` are helpers."""

"""Strategies of a group: per axis, and as products over the axes of a mesh."""

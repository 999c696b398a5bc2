"""Replicas of the parameters along a mesh axis, which train apart for some steps and are averaged (local_steps)."""

"""Shares of a batch for groups of unlike devices."""

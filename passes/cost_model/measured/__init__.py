"""Costs from measurements on this machine, scaled formulas where nothing was measured."""

"""Fitting the figures of a device to measured steps."""

"""Calibration of a device: fit its efficiencies to measured step times."""

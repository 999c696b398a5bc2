"""Studies and calibrations that are only used by commands."""

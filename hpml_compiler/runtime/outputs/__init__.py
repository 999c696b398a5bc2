"""Outputs of compiled graphs that are computed when the script reads them."""

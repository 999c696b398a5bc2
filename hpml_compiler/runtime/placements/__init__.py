"""Placements that DTensor lacks, and conversion between whole tensors and the ranks' parts."""

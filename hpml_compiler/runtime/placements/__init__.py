"""Placements that DTensor lacks, and the way between a whole tensor and the parts that ranks have."""

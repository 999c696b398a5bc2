"""What work and messages cost: one interface (`base`), and the providers behind it."""
from passes.costs.base import COLLECTIVE_KINDS, COMPUTE_KINDS, CostModel, OptimizerModel
from passes.costs.collectives import collective_lines, collective_us
from passes.costs.roofline import RooflineCost

__all__ = [
    "COLLECTIVE_KINDS",
    "COMPUTE_KINDS",
    "CostModel",
    "OptimizerModel",
    "RooflineCost",
    "collective_lines",
    "collective_us",
]

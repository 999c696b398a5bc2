"""Predicted costs of kernels, collectives and optimizers: one interface (`base`), and the providers behind it."""
from passes.cost_model.base import COLLECTIVE_KINDS, COMPUTE_KINDS, CostModel, OptimizerModel
from passes.cost_model.collective_costs import collective_lines, collective_us
from passes.cost_model.roofline import RooflineCost

__all__ = [
    "COLLECTIVE_KINDS",
    "COMPUTE_KINDS",
    "CostModel",
    "OptimizerModel",
    "RooflineCost",
    "collective_lines",
    "collective_us",
]

"""Costs as formulas over batch, sequence and axis sizes."""
from hpml_compiler.symbolic.build import formulas

__all__ = ["formulas"]

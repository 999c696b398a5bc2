"""Costs as formulas over batch, sequence and axis sizes."""
from hpml_compiler.instruments.cost_formulas.formula_builder import formulas

__all__ = ["formulas"]

"""Symbolic costs of a plan: formulas over batch, sequence and mesh axis sizes."""
from hpml_compiler.instruments.cost_formulas.formula_builder import formulas

__all__ = ["formulas"]

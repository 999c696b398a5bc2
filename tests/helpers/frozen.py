"""Imported last -> what is there by then is no longer looked through for garbage, here and in what is forked from here.

Models and optimizers are made later, so those that search the memory for them find the same ones, in a fifth less time.
"""
from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch._dynamo.guards

import hpml_compiler
from passes.op_rules import rule_table


def fresh() -> None:
    """Between cases of one process: all compiler state is as in a new one, and what earlier cases left is not searched."""
    hpml_compiler.reset()
    freeze()


def in_turn(rank: int, *scenes: Callable[[int], object]) -> None:
    """For one launch of ranks: functions of a rank, one after another."""
    for scene in scenes:
        fresh()
        try:
            scene(rank)
        except Exception as error:
            raise AssertionError(f"in {scene}") from error


def freeze() -> None:
    gc.collect()
    gc.freeze()


# Dynamo times the guards of each function that it compiles, for its debug log, and first writes over the caches of the CPU:
# 20 to 50 ms of CPU each, or 4 % of what tests compile.
if hasattr(torch._dynamo.guards, "profile_guard_manager"):
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# What the first compilation would do in each process.
rule_table.load()
torch.overrides.get_overridable_functions()
freeze()

"""An operator that takes a time for each row: it sleeps, so that the time does not depend on what else the machine does."""
from __future__ import annotations

import time

import torch

from passes.op_rules.base import make_rule
from passes.op_rules.rule_table import load, rule

seconds_per_row = [0.0]


@torch.library.custom_op("hpml_slow::work", mutates_args=())
def work(x: torch.Tensor) -> torch.Tensor:
    """A copy of x, after `seconds_per_row[0]` for each of its rows."""
    time.sleep(x.shape[0] * seconds_per_row[0])
    return x.clone()


@work.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


work.register_autograd(lambda ctx, gradient: gradient)


def register() -> None:
    """Let hpml split its rows, and count them as work."""
    load()
    rule("hpml_slow::work", heavy="matmul", flops=lambda x, out_val: 1e6 * x.numel())(
        lambda call: make_rule(call, ["rf"], ["rf"]))

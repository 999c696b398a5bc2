"""Inductor's partitioner behind a pass over the joint graph."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn


class PartitionerBehindPass(CustomPartitionerFn):
    """run: the pass; takes the graph and the number of forward's outputs. key: equal for passes that do the same. usual: the
    partitioner that is configured, None for inductor's own."""

    def __init__(self, run: Callable[[torch.fx.GraphModule, int], Any], key: str, usual: Any) -> None:
        self.run, self.key, self.usual = run, key, usual

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        self.run(gm, kwargs["num_fwd_outputs"])
        return (self.usual or min_cut_rematerialization_partition)(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return self.key, None if self.usual is None else self.usual.uuid()

    def __reduce__(self) -> Any:
        """For keys of inductor's caches, which pickle its settings."""
        return str, (str(self.uuid()),)

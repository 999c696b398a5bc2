"""Wrap the results of a compiled graph that stay sharded."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from hpml_compiler.runtime.consistency.input_check import gradient_check
from hpml_compiler.runtime.dtensor.lazy_outputs import OutputState, lazy_output
from passes import compat


@dataclass(frozen=True)
class ShardedOutput:
    """An output that a graph leaves sharded. position: among the graph's results. like: the full tensor, as traced. name: in
    the graph."""

    position: int
    placements: tuple[Placement, ...]
    like: torch.Tensor
    name: str


class OutputWrapper:
    """Wraps the results of one compiled graph for the script."""

    def __init__(self, graph: str, mesh: DeviceMesh, left: Sequence[ShardedOutput]) -> None:
        self.graph, self.calls = graph, 0
        self._left = [
            (each, compat.interned_spec(compat.dtensor_spec(mesh, each.placements, each.like)),
             gradient_check(graph, each.position, each.like) if each.like.is_floating_point() else None) for each in left]

    def given(self, results: Sequence[Any]) -> list[Any]:
        self.calls += 1
        given = list(results)
        for each, spec, gradient in self._left:
            shared = OutputState(f"output {each.position} ({each.name}) of {self.graph}, call {self.calls}", gradient)
            given[each.position] = lazy_output(given[each.position], spec, shared)
        return given

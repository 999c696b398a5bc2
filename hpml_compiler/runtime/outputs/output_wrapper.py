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
from hpml_compiler.runtime.outputs.record import AllRecords
from hpml_compiler.runtime.outputs.recorded_output import OutputRecorder, watch_autograd
from passes import compat
from passes.session_state import state_of


@dataclass(frozen=True)
class ShardedOutput:
    """An output that a graph leaves sharded. position: among the graph's results. like: the full tensor, as traced. name: in
    the graph."""

    position: int
    placements: tuple[Placement, ...]
    like: torch.Tensor
    name: str


class OutputWrapper:
    """Wraps the results of one compiled graph for the script. compile_options: of graphs for what it calls on them, as JSON."""

    def __init__(self, graph: str, mesh: DeviceMesh, left: Sequence[ShardedOutput], compile_options: str = "") -> None:
        self.graph, self.calls = graph, 0
        self.recorder = OutputRecorder(compile_options) if compile_options else None
        watch_autograd()
        self._left = [
            (each, compat.interned_spec(compat.dtensor_spec(mesh, each.placements, each.like)),
             gradient_check(graph, each.position, each.like) if each.like.is_floating_point() else None) for each in left]

    def given(self, results: Sequence[Any]) -> list[Any]:
        self.calls += 1
        state_of(AllRecords).end()
        given = list(results)
        for each, spec, gradient in self._left:
            what = f"output {each.position} ({each.name}) of {self.graph}, call {self.calls}"
            shared = OutputState(what, gradient, self.recorder)
            given[each.position] = lazy_output(given[each.position], spec, shared)
        return given

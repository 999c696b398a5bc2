"""Wrap the results of a compiled graph that stay sharded, and count what the script does with results."""
from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from hpml_compiler.runtime.consistency.input_check import gradient_check
from hpml_compiler.runtime.dtensor.lazy_outputs import OutputState, lazy_output
from hpml_compiler.runtime.outputs.record import GATHERED_BYTES, AllRecords
from hpml_compiler.runtime.outputs.recorded_output import OutputRecorder, watch_autograd
from hpml_compiler.runtime.process.world_group import this_rank
from hpml_compiler.runtime.watchdog.rank_status import call_of_script
from passes import compat
from passes.session_state import state_of

log = logging.getLogger("hpml")


@dataclass
class OutputUse:
    """Uses of one output of a graph by the script. calls: of the graph. made: of those, the number in which the output
    was computed. on_shards: times that something was computed on its shards. reads, gathers: times, by the call in the script.
    """

    graph: str
    position: int
    name: str
    calls: int = 0
    made: int = 0
    on_shards: int = 0
    reads: Counter[str] = field(default_factory=Counter)
    gathers: Counter[str] = field(default_factory=Counter)

    def note_read(self) -> None:
        self.reads[call_of_script()] += 1

    def note_gather(self, tensor: Any) -> None:
        """Count a gather, and log the first by each line of the script if it is large. tensor: shape and dtype."""
        where, size = call_of_script(), math.prod(tensor.shape) * tensor.dtype.itemsize
        self.gathers[where] += 1
        if size > GATHERED_BYTES and self.gathers[where] == 1 and this_rank() == 0:
            log.info("output %d (%s) of %s, %.3g MiB, is gathered on every rank: by %s", self.position, self.name, self.graph,
                     size / 2 ** 20, where)

    def described(self) -> str:
        """A line for reports."""
        calls = max(self.calls, self.made)
        parts = [f"computed in {self.made} of {calls} calls" if self.made < calls else f"computed in each of {calls} calls"]
        parts += [f"used {_times(self.on_shards)} as shards"] if self.on_shards else []
        for verb, found in (("read", self.reads), ("gathered", self.gathers)):
            parts += [f"{verb} by {where} ({_times(count)})" for where, count in found.most_common()]
        if len(parts) == 1:
            parts.append("never read")
        return f"{self.graph}: output {self.position} ({self.name}): {', '.join(parts)}"


class OutputUses(dict[tuple[str, int], OutputUse]):
    """Those of all graphs, by graph and position, in the order in which they were compiled."""

    is_of_models = True

    def of(self, graph: str, position: int, name: str) -> OutputUse:
        return self.setdefault((graph, position), OutputUse(graph, position, name))

    def move(self, graph: str, positions: Mapping[int, int]) -> None:
        """Give the outputs of a graph other positions. Those without one are no outputs for the script."""
        found = {key: self.pop(key) for key in list(self) if key[0] == graph}
        for (_, position), use in found.items():
            if position in positions:
                use.position = positions[position]
                self[graph, use.position] = use


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


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
             gradient_check(graph, each.position, each.like) if each.like.is_floating_point() else None,
             state_of(OutputUses).of(graph, each.position, each.name)) for each in left]

    def given(self, results: Sequence[Any]) -> list[Any]:
        self.calls += 1
        state_of(AllRecords).end()
        given = list(results)
        for each, spec, gradient, use in self._left:
            what = f"output {each.position} ({each.name}) of {self.graph}, call {self.calls}"
            shared = OutputState(what, gradient, self.recorder, use=use)
            use.made += 1
            given[each.position] = lazy_output(given[each.position], spec, shared)
        return given

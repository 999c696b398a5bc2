"""Memory around the loop over microbatches: accumulated gradients, and values computed once for all microbatches.

The loop body has a storage program of its own, which counts one microbatch. The memory counted here, while the body runs and
before and after the loop, does not depend on what the body saves for backward.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.fx_nodes import memory_of
from passes.graph.loops.loop_order import AFTER, BACKWARD, BEFORE, FORWARD, loop_parts, read_later
from passes.graph.loops.loop_parts import GraphFragment, LoopOutput, PrologueEpilogue
from passes.json_records import FrozenMap
from passes.simulation.memory.memory_breakdown import MemoryMoment, fullest
from passes.simulation.memory.memory_trace import simulate_memory
from passes.simulation.memory.storage_program import Microbatches, StorageProgram


@dataclass(frozen=True)
class LoopMemory:
    """count: number of microbatches. others: what other microbatches have in memory while one runs. forward, backward: further
    bytes by part in memory while the forward, or the backward, of a microbatch runs. first, last: peaks before and after the
    loop. gradient_bytes: of the gradients that the graph returns."""

    count: int
    others: Microbatches
    forward: FrozenMap[str, int]
    backward: FrozenMap[str, int]
    first: MemoryMoment
    last: MemoryMoment
    gradient_bytes: int

    @property
    def around(self) -> int:
        """Most bytes in memory around the body."""
        return max(sum(self.forward.values()), sum(self.backward.values()))

    def of_step(self, kept: CheckpointDecision, budget_bytes: float, after_bytes: float) -> CheckpointDecision:
        """The decision of the whole graph, given that of its body. budget_bytes: of the graph. after_bytes: in memory besides
        during the optimizer step."""
        account = kept.account
        ahead = self.first, *(_with(each, self.forward) for each in account.forward_moments or (MemoryMoment(),))
        back = *(_with(each, self.backward) for each in account.backward_moments or (MemoryMoment(),)), self.last
        account = replace(
            account, forward_moments=ahead, backward_moments=back, gradient_bytes=self.gradient_bytes,
            offloaded=tuple((name, block, nbytes, self.count * us) for name, block, nbytes, us in account.offloaded),
            again=tuple((name, block, self.count * us) for name, block, us in account.again))
        return replace(
            kept, recompute_us=self.count * kept.recompute_us, offload_us=self.count * kept.offload_us,
            forward_bytes=account.forward.nbytes, backward_bytes=account.backward.nbytes,
            saved_bytes=self.others.in_flight * kept.saved_bytes,
            after_bytes=round(self.gradient_bytes + after_bytes), budget_bytes=budget_bytes, account=account)


def loop_memory(marked: GraphModule, loop: PrologueEpilogue, forward_outputs: int, count: int, at_once: bool,
                program_of: Callable[[GraphModule, int], StorageProgram], layers: Callable[[Node], int]) -> LoopMemory:
    """Count the memory around a loop over `count` microbatches. marked: the graph that the loop was cut out of.
    forward_outputs: number of its outputs that are forward's. at_once: see `loop_parts`. program_of: builds the storage program
    of a graph with so many outputs. layers: number of nodes of the model that a traced node stands for."""
    return _Around(marked, loop, at_once, program_of, layers).memory(forward_outputs, count)


class _Around:
    def __init__(self, marked: GraphModule, loop: PrologueEpilogue, at_once: bool,
                 program_of: Callable[[GraphModule, int], StorageProgram], layers: Callable[[Node], int]):
        self.loop, self.at_once, self.program_of, self.layers = loop, at_once, program_of, layers
        self.nodes = {node.name: node for node in marked.graph.nodes}
        self.given = {memory_of(node) for node in marked.graph.find_nodes(op="placeholder")}
        self.there = self._there()

    def memory(self, forward_outputs: int, count: int) -> LoopMemory:
        loop, at_once = self.loop, self.at_once
        others = Microbatches.of_loop(count, self._added(loop.backward), at_once)
        outputs = {"transient": self._added(loop.forward)}
        ahead = _sum(self._bytes(self.there[FORWARD]), outputs)
        names = self.there[BACKWARD] - {each.name for each in loop.forward} if at_once else self.there[BACKWARD]
        back = _sum(self._bytes(names), outputs if at_once else {})
        moments = {name: self._moment(name, segment)
                   for names, segments in ((BEFORE, loop.before), (AFTER, loop.after))
                   for name, segment in zip(names, segments, strict=True)}
        first = [BEFORE[0], BEFORE[1] if at_once else AFTER[0]]
        returned = frozenset(name for name in loop.results[forward_outputs:] if name is not None)
        return LoopMemory(
            count, others, FrozenMap(ahead), FrozenMap(back), fullest([moments[name] for name in first]),
            fullest([moments[name] for name in moments if name not in first]), sum(self._bytes(returned).values()))

    def _there(self) -> dict[str, frozenset[str]]:
        """Values in memory while each part of the loop runs: made before it and read by it or later."""
        found, made, later = {}, set[str](), read_later(self.loop, self.at_once)
        for part in loop_parts(self.loop, self.at_once):
            found[part.name] = frozenset(made) & (later[part.name] | part.reads)
            made.update(part.makes)
        return found

    def _bytes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of these values by part; shared memory counts once, that of the graph's inputs not at all."""
        collected = {each.name for each in self.loop.backward}
        found: Counter[str] = Counter()
        seen = set(self.given)
        for name in sorted(names):
            node = self.nodes[name]
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and (where := memory_of(value)) not in seen:
                seen.add(where)
                part = "gradients" if name in collected else "transient"
                found[part] += self.layers(node) * value.untyped_storage().nbytes()  # of a view, all that it keeps alive
        return dict(found)

    def _added(self, collected: Iterable[LoopOutput]) -> int:
        """Bytes of accumulated or concatenated outputs of the loop."""
        return sum(self.layers(self.nodes[each.name]) * torch.Size(each.shape).numel() * each.dtype.itemsize
                   for each in collected)

    def _moment(self, name: str, segment: GraphFragment) -> MemoryMoment:
        """Peak of a segment around the loop."""
        there = self._bytes(self.there[name])
        if segment.gm is None:
            return MemoryMoment(name, parts=FrozenMap(there))
        own = simulate_memory(self.program_of(segment.gm, len(segment.makes)), ()).forward.most_bytes
        for made in segment.makes:  # of layers that a traced one stands for
            value, layers = self.nodes[made].meta.get("val"), self.layers(self.nodes[made])
            if layers > 1 and isinstance(value, torch.Tensor):
                own += (layers - 1) * value.numel() * value.element_size()
        return MemoryMoment(name, parts=FrozenMap(_sum(there, {"transient": own})))


def _with(moment: MemoryMoment, more: Mapping[str, int]) -> MemoryMoment:
    return replace(moment, parts=FrozenMap(_sum(moment.parts, more)))


def _sum(*parts: Mapping[str, int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for each in parts:
        found.update(each)
    return {part: nbytes for part, nbytes in found.items() if nbytes}

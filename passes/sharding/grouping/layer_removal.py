"""Remove one of a model's equal layers from its placement graph, without tracing again.

A layer can be removed if its predecessor is equal: call by call, in the same order, with the same wiring. The values that
pass from the predecessor in forward, and to it in backward, are rewired to the successor of the removed layer. Where
layers are not equal in this sense, there is no such graph, and the shorter model has to be traced.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace

from passes.graph.placement_graph import Operation, PlacementGraph
from passes.json_records import FrozenMap
from passes.sharding.grouping.group_symmetry import value_signature


def without_layers(graph: PlacementGraph, blocks: Mapping[str, str]) -> PlacementGraph | None:
    """`graph` without some blocks. blocks: path of each removed block -> path of the block before it, which stays.

    None if a block and its predecessor differ, or if their values are read by other blocks than their neighbors.
    """
    try:
        return _LayerRemoval(graph, blocks).spliced()
    except _BlocksDiffer:
        return None


class _BlocksDiffer(Exception):
    """The blocks do not correspond."""


def _hold(condition: object) -> None:
    if not condition:
        raise _BlocksDiffer


class _LayerRemoval:
    """twins: removed value -> the corresponding value of the predecessor. instead: removed value -> the value of the
    successor that the predecessor reads instead, in backward."""

    def __init__(self, graph: PlacementGraph, blocks: Mapping[str, str]):
        self.graph, self.blocks = graph, blocks
        self.operations: dict[int, Operation] = {}
        """Removed operation -> the corresponding operation of the predecessor."""
        self.twins: dict[int, int] = {}
        self.instead: dict[int, int] = {}
        self._entering: dict[int, int] = {}
        self._pair_operations()
        for gone, kept in self.operations.items():
            for v, w in zip(graph.operations[gone].inputs, kept.inputs, strict=True):
                self._pair_inputs(graph.operations[gone].block, v, w)
        _hold(len(set(self.twins.values())) == len(self.twins))
        for v, w in self.twins.items():
            _hold(value_signature(graph.values[v]) == value_signature(graph.values[w]))
            _hold((v in graph.saved) == (w in graph.saved))
            self._check_readers(v, w)
        self._check_outputs()

    def _pair_operations(self) -> None:
        members: dict[str, list[Operation]] = {}
        for op in self.graph.operations:
            members.setdefault(op.block, []).append(op)
        for gone, kept in self.blocks.items():
            ours, theirs = members.get(gone, []), members.get(kept, [])
            _hold(ours and [_does(op) for op in ours] == [_does(op) for op in theirs])
            for op, twin in zip(ours, theirs, strict=True):
                self.operations[op.index] = twin
                self.twins.update(zip(op.outputs, twin.outputs, strict=True))

    def _home(self, v: int) -> str:
        """The block that computes a value, if it is a removed block or its predecessor."""
        producer = self.graph.values[v].producer
        block = "" if producer is None else self.graph.operations[producer].block
        return block if block in self.blocks or block in self.blocks.values() else ""

    def _pair_inputs(self, gone: str, v: int, w: int) -> None:
        """Match an operand of the block with the operand of its twin at the same position."""
        values, homes = self.graph.values, (self._home(v), self._home(w))
        if homes == (gone, self.blocks[gone]):
            _hold(self.twins[v] == w)
        elif homes == (self.blocks[gone], ""):  # forward: each reads the output of the layer before it
            _hold(self._entering.setdefault(v, w) == w and value_signature(values[v]) == value_signature(values[w]))
        elif homes == ("", gone):  # backward: each reads a gradient from the layer after it
            _hold(self.instead.setdefault(w, v) == v and value_signature(values[v]) == value_signature(values[w]))
        elif homes == ("", "") and v != w:  # each has its own parameters
            _hold(values[v].producer is None and values[w].producer is None and self.twins.setdefault(v, w) == w)
        else:
            _hold(homes == ("", ""))

    def _check_readers(self, v: int, w: int) -> None:
        """A value and its twin must have the same readers, and outside their blocks only in the layer after, or only in the
        layer before."""
        operations, near = self.graph.operations, {*self.blocks, *self.blocks.values()}
        ours, theirs = self.graph.values[v].users, self.graph.values[w].users
        if self.graph.values[v].producer is None:
            _hold(all(operations[u].block in self.blocks for u in ours))
            _hold(all(operations[u].block in self.blocks.values() for u in theirs))
            return
        gone = self._home(v)
        ours = [operations[u] for u in ours if operations[u].block != gone]
        theirs = [operations[u] for u in theirs if operations[u].block != self.blocks[gone]]
        on = {op.block for op in theirs} <= {gone} and near.isdisjoint(op.block for op in ours)
        back = {op.block for op in ours} <= {self.blocks[gone]} and near.isdisjoint(op.block for op in theirs)
        _hold(on or back)
        _hold([op.target for op in ours] == [op.target for op in theirs] if on else bool(ours) == bool(theirs))

    def _check_outputs(self) -> None:
        """Each output of the block, and each gradient of its parameters, must have a twin among the outputs."""
        stay = set(self.twins.values())
        gone = Counter((self.twins[v], None if p is None else self.twins.get(p, -1)) for v, p in self.graph.outputs
                       if v in self.twins)
        _hold(gone == Counter((v, p) for v, p in self.graph.outputs if v in stay))
        _hold(all(v in self.twins for v, p in self.graph.outputs if p in self.twins))
        _hold(all((v in self.twins) == (t in self.twins) for v, t in self.graph.unread.items() if t is not None))

    def spliced(self) -> PlacementGraph:
        graph = self.graph
        numbers = {v.index: k for k, v in enumerate(v for v in graph.values if v.index not in self.twins)}
        position = {op.index: k for k, op in enumerate(op for op in graph.operations if op.index not in self.operations)}
        kept = {twin.index for twin in self.operations.values()}

        def read(op: Operation, v: int) -> int:
            if v in self.twins:
                found = self.instead.get(v) if op.index in kept else self.twins[v]
                _hold(found in numbers)
                assert found is not None, "`_hold` raises where it is"
                return numbers[found]
            return numbers[v]

        operations = tuple(
            replace(op, index=position[op.index], inputs=tuple(read(op, v) for v in op.inputs),
                    outputs=tuple(numbers[v] for v in op.outputs))
            for op in graph.operations if op.index in position)
        users: dict[int, dict[int, None]] = {k: {} for k in numbers.values()}
        for op in operations:
            for v in op.inputs:
                users[v][op.index] = None
        values = tuple(
            replace(v, index=numbers[v.index], users=tuple(users[numbers[v.index]]),
                    producer=None if v.producer is None else position[v.producer])
            for v in graph.values if v.index in numbers)
        names = {graph.operations[i].name for i in self.operations}
        return PlacementGraph(
            operations, values,
            tuple((numbers[v], None if p is None else numbers[p]) for v, p in graph.outputs if v in numbers),
            FrozenMap({target: left for target, found in graph.unruled.items()
                       if (left := tuple(name for name in found if name not in names))}),
            frozenset(numbers[v] for v in graph.saved if v in numbers),
            FrozenMap({numbers[v]: None if t is None else numbers[t] for v, t in graph.unread.items() if v in numbers}))


def _does(op: Operation) -> Hashable:
    return op.target, op.kind, op.strategies, op.flops, op.phase, op.ruled, op.linear, len(op.inputs), len(op.outputs)

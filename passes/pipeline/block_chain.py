"""Chain of a model's blocks in order of execution, the values that cross between blocks, and the possible cuts.

A block is the set of calls under one path (`h.3`), as long as none of its operands depends on its own results: a path that is
called again after that is another block (`h.3@1`), so the blocks form a directed acyclic graph. Values that
can be computed from the batch alone (masks, positions) cross nothing: each reader recomputes them.

    cut            between two consecutive blocks; crossing values are computed before it and read after it
        dominator      a block on every path from the first block to another one
        articulation   a block whose removal disconnects the graph

A cut crossed only by one block's results is a cheap end of a pipeline stage; skip connections (a U-Net, an
encoder that every block of a decoder reads) show as values that cross many cuts.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from passes.graph.placement_graph import block_class

FIRST = ""
"""Virtual root before all blocks that read nothing from others."""


@dataclass(frozen=True)
class ForwardCall:
    """A call of forward. reads: names of calls; names that did not come before (inputs, parameters) are available everywhere.
    does: equal for equal calls; free: computed from the batch alone, and not random."""

    name: str
    path: str
    reads: tuple[str, ...] = ()
    bytes: float = 0.0
    does: Hashable = None
    free: bool = False


@dataclass(frozen=True)
class ChainBlock:
    """path: module path; name: the same, with `@1` for its second turn. pieces: in order of execution."""

    name: str
    path: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class CrossBlockValue:
    """A value that one block computes and others read, in their order."""

    value: str
    source: str
    readers: tuple[str, ...]
    bytes: float


@dataclass(frozen=True)
class BlockBoundary:
    """Values that cross after a block; single: all of them come from that block."""

    after: str
    values: tuple[str, ...]
    bytes: float
    single: bool


@dataclass(frozen=True)
class BlockChain:
    """blocks: in order of execution. crossings: by the order of their sources. repetitions: names of blocks that do the
    same with the same wiring, under paths that differ in their indices; each block is in one."""

    blocks: tuple[ChainBlock, ...]
    crossings: tuple[CrossBlockValue, ...]
    repetitions: tuple[tuple[str, ...], ...]

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Blocks by name; each edge has the `bytes` and `values` that are read along it."""
        found = nx.DiGraph()
        found.add_nodes_from(block.name for block in self.blocks)
        for crossing in self.crossings:
            for reader in crossing.readers:
                known = found.get_edge_data(crossing.source, reader, {"bytes": 0.0, "values": ()})
                found.add_edge(crossing.source, reader, bytes=known["bytes"] + crossing.bytes,
                               values=(*known["values"], crossing.value))
        return found

    @cached_property
    def dominators(self) -> dict[str, str]:
        """Immediate dominator of each block, FIRST if there is none."""
        rooted = self.graph.copy()
        rooted.add_edges_from([(FIRST, name) for name, degree in self.graph.in_degree() if not degree])
        found = nx.immediate_dominators(rooted, FIRST)
        return {block.name: found[block.name] for block in self.blocks}

    @cached_property
    def articulation_points(self) -> frozenset[str]:
        return frozenset(nx.articulation_points(self.graph.to_undirected()))

    @cached_property
    def cuts(self) -> tuple[BlockBoundary, ...]:
        """One boundary between every two consecutive blocks."""
        position = {block.name: k for k, block in enumerate(self.blocks)}
        found = []
        for k, block in enumerate(self.blocks[:-1]):
            over = [c for c in self.crossings if position[c.source] <= k < max(position[r] for r in c.readers)]
            found.append(BlockBoundary(block.name, tuple(c.value for c in over), sum(c.bytes for c in over),
                                       all(c.source == block.name for c in over)))
        return tuple(found)


def chain_of_blocks(pieces: Sequence[ForwardCall]) -> BlockChain:
    """Build the chain. pieces: in an order of execution."""
    home = _homes(pieces)
    members: dict[_Turn, list[ForwardCall]] = defaultdict(list)
    readers: dict[str, dict[_Turn, None]] = {}
    for piece in pieces:
        members[home[piece.name]].append(piece)
        for value in piece.reads:
            if value in readers and home[value] != home[piece.name]:
                readers[value][home[piece.name]] = None
        readers[piece.name] = {}
    crossing = [piece for piece in pieces if readers[piece.name] and not piece.free]
    order = _order(members, home, {piece.name: readers[piece.name] for piece in crossing})
    position = {turn: k for k, turn in enumerate(order)}
    names = {turn: turn[0] + (f"@{turn[1]}" if turn[1] else "") for turn in order}
    alike: dict[Hashable, list[str]] = defaultdict(list)
    for turn in order:
        alike[block_class(turn[0]), _signature(members[turn], readers)].append(names[turn])
    return BlockChain(
        tuple(ChainBlock(names[turn], turn[0], tuple(piece.name for piece in members[turn])) for turn in order),
        tuple(CrossBlockValue(piece.name, names[home[piece.name]],
                              tuple(names[turn] for turn in sorted(readers[piece.name], key=position.__getitem__)), piece.bytes)
              for piece in sorted(crossing, key=lambda piece: position[home[piece.name]])),
        tuple(map(tuple, alike.values())),
    )


_Turn = tuple[str, int]
"""(path, how often it was left and entered again)."""


def _homes(pieces: Sequence[ForwardCall]) -> dict[str, _Turn]:
    """The block of each call: a new turn of its path where the current one would otherwise depend on itself."""
    home: dict[str, _Turn] = {}
    turns: dict[str, int] = defaultdict(int)
    before: dict[_Turn, set[_Turn]] = {}  # transitive dependencies of a block
    free = {piece.name for piece in pieces if piece.free}
    for piece in pieces:
        sources = {home[value] for value in piece.reads if value in home and value not in free}
        own = piece.path, turns[piece.path]
        if any(own in before[source] for source in sources - {own}):
            turns[piece.path] += 1
            own = piece.path, turns[piece.path]
        home[piece.name] = own
        before.setdefault(own, set())
        new = sources.union(*(before[source] for source in sources)) - {own}
        for turn, waits in before.items():  # dependents of this block get its dependencies, too
            if turn == own or own in waits:
                waits |= new
    return home


def _order(members: Mapping[_Turn, object], home: Mapping[str, _Turn], crossing: Mapping[str, Iterable[_Turn]]) -> list[_Turn]:
    """Order of first call, moved after the blocks that each one reads."""
    graph = nx.DiGraph()
    graph.add_nodes_from(members)
    graph.add_edges_from((home[value], reader) for value, readers in crossing.items() for reader in readers)
    started = {turn: number for number, turn in enumerate(members)}
    return list(nx.lexicographical_topological_sort(graph, key=started.__getitem__))


def _signature(members: Sequence[ForwardCall], readers: Mapping[str, Mapping[_Turn, None]]) -> Hashable:
    """Equal for blocks whose calls correspond one to one: operators, wiring, and values read outside."""
    inside = {piece.name: k for k, piece in enumerate(members)}
    outside: dict[str, int] = {}
    return tuple(
        (piece.does, tuple(("in", inside[v]) if v in inside else ("out", outside.setdefault(v, len(outside)))
                           for v in piece.reads), bool(readers[piece.name]))
        for piece in members)

"""What a graph was rewritten to, kept for the next launch: which then traces, plans and rewrites nothing.

What is kept are the halves of the graph as they were compiled, or the parts of one in microbatches (`compile.cut`) or stages
(`compile.cut_stages`), and all that running them takes. They are compiled again, which inductor's own cache answers;
AOTAutograd is given a stand-in (`compile.stand_in`) for the graph, and makes of it what stands around the halves. That is so
for graphs around which it passes on, and copies the new values of inputs into them, and no more: `compat.results_as_traced`,
`compat.inputs_written_as_traced`. Where a plan is made only when it is asked for, what it is made of is kept, too.

All ranks take what an earlier launch left, of one and the same plan, or none does.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.cut import Cut
from hpml_compiler.compile.cut_stages import CutInStages
from hpml_compiler.compile.launch_key import Given, NotTold, key_of
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.runtime_metadata import RuntimeMetadata
from hpml_compiler.compile.stand_in import Result, returns_new_tensors, stand_in
from hpml_compiler.compile.unplanned import UNPLANNED, Unplanned
from hpml_compiler.options import Options
from hpml_compiler.planning import measurements
from hpml_compiler.planning.room import Sharing
from hpml_compiler.plans import graph_file, plan_file
from hpml_compiler.plans.cache_warnings import warn_of_cache
from hpml_compiler.profile.looks import HOLDS_S
from hpml_compiler.runtime.at import at
from hpml_compiler.runtime.inner_shard import InnerShard
from hpml_compiler.runtime.owned import Owned
from hpml_compiler.runtime.together import CALLING, together
from hpml_compiler.runtime.world import from_all_ranks
from passes import compat
from passes.errors import BadInput, HpmlError
from passes.graph import plain_data
from passes.graph.nodes import memory_of, returned_nodes
from passes.graph.packed_graph import TRACED_META, CannotPack, check, pack, unpack
from passes.transform.microbatches import Loop

log = logging.getLogger("hpml")
KINDS = (RuntimeMetadata, Cut, CutInStages, Loop, Owned, InnerShard)
"""Classes of what `keep` and `note` are given: the only ones, with those of their fields, that are read of a file."""


@dataclass(frozen=True)
class Around:
    """What AOTAutograd makes of a graph that follows from what goes in and out of it: equal of the graph and its stand-in."""

    results: tuple[Result, ...]
    written: tuple[compat.WrittenInput, ...]

    @staticmethod
    def of(results: Sequence[torch.Tensor], written: tuple[compat.WrittenInput, ...]) -> Around:
        """Inside the compiler of forward; raises compat.MoreAround. results: those of the traced graph."""
        traced = compat.results_as_traced(results)
        return Around(tuple(Result.like(x, differentiable) for x, differentiable in traced), written)


@dataclass(frozen=True)
class Entry:
    """What is in the cache. running: what a call of the graph takes besides compiled code. graphs: what is compiled, packed.
    unplanned: what its plan is made of when somebody asks (`compile.unplanned`), packed. around: what AOTAutograd sees of the
    graph. writes_over: see `compat.places_written_over`. plan: the same on ranks that obey one plan. prices: of what the plan
    was priced with, where `hpml profile` measured it. until: when it is too old."""

    running: RuntimeMetadata
    graphs: bytes
    unplanned: bytes | None
    around: Around
    writes_over: frozenset[int] | None
    plan: str
    prices: str
    until: float


@dataclass
class Noted:
    """Of one compilation, what becomes an entry."""

    graphs: bytes
    unplanned: bytes | None = None
    around: Around | None = None
    writes_over: frozenset[int] | None = None


@dataclass
class Earlier:
    """What earlier launches know of one graph, and what the next one will. All ranks make it together, before it is traced.

    found: what was left for it; `graph` and `restored` then take the place of tracing.
    """

    gm: GraphModule
    given: Given
    options: Options
    sharing: Sharing | None = None
    """Under a budget, what the graph shares with the others of its step."""
    key: str = ""
    found: Entry | None = None
    noted: Noted | None = None
    results: list[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.session = session.current()
        self.number = len(self.session.graphs) + len(self.session.unplanned)
        self.world, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.cluster = local_cluster(self.options, self.world)
        with compat.outside_tracing():
            self.key = self._key()
            found = self._read() if self.key else None
            told = self._of_all_ranks((self.key, found and found.plan))
        self.session.trail.append(self.key or "?")
        if found is not None and all(each == told[0] for each in told):
            self.found = found
            if self.rank == 0:
                log.info("graph_%d: rewritten as in an earlier launch; HPML_CACHE=0 does it anew", self.number)

    def _of_all_ranks(self, mine: Any) -> list[Any]:
        if self.world == 1:
            return [mine]
        with at("looking for what an earlier launch made of this graph"):
            together("compiling a graph", CALLING, every=0)
            return from_all_ranks(mine)

    def _key(self) -> str:
        if not plan_file.is_on():
            return ""
        try:
            if not returns_new_tensors(self.gm):
                raise NotTold("it returns something else than tensors, or what it is given")
            return key_of(self.gm, self.given, self.options, self.cluster, self.session.trail, self.sharing)
        except NotTold as why:
            self._not_kept(str(why))
            return ""

    def _read(self) -> Entry | None:
        try:
            packed = graph_file.get(self._name())
        except BadInput as error:
            warn_of_cache("what earlier launches made of graphs cannot be read", error)
            return None
        if packed is None:
            return None
        try:
            found = plain_data.loads(packed, plain_data.classes_of(Entry, *KINDS))
            if type(found) is not Entry:
                raise plain_data.NotPlain(f"it is {type(found).__name__}")
            check(found.graphs, *KINDS)
            if found.unplanned is not None:
                check(found.unplanned, *UNPLANNED)
        except plain_data.NotPlain as error:
            warn_of_cache("what an earlier launch made of this graph is not read", BadInput(
                f"the cache of graphs has an entry that hpml did not write: {error}", str(graph_file.path()),
                "run `hpml doctor --clear-cache`, and find out who wrote it"))
            return None
        return found if time.time() < found.until and found.prices == self._prices(found.running.graph_hash) else None

    def _name(self) -> str:
        return f"{self.key} {self.rank}"

    def _prices(self, graph_hash: str) -> str:
        return measurements.digest(self.options, self.cluster, graph_hash)

    # With what an earlier launch left.

    @property
    def graph(self) -> GraphModule:
        """What AOTAutograd traces."""
        return self.gm if self.found is None else stand_in(self.gm, self.found.around.results, self.found.around.written)

    def restored(self) -> Any:
        """What `note` was given."""
        assert self.found is not None, "there is nothing else to restore"
        mode = compat.fake_mode()
        with compat.outside_tracing(), torch.no_grad():
            return unpack(self.found.graphs, mode, *KINDS)

    @property
    def writes_over(self) -> frozenset[int] | None:
        """What compiling backward may write over, if that is known: never more than then."""
        return None if self.found is None else self.found.writes_over

    # For the next launch.

    def note_results(self, whole: GraphModule, outputs: int | None) -> None:
        """whole: the traced graph, before it is rewritten. outputs: how many of its results are forward's; None for all."""
        if self.key and self.found is None:
            nodes = returned_nodes(whole)[:outputs]
            self.results = [node.meta["val"] for node in nodes if node is not None]

    def note(self, graphs: Any, handed: Iterable[Any] = (), unplanned: Unplanned | None = None) -> None:
        """What is compiled, before that changes it: graphs, or data with graphs in it. handed: fakes of what forward makes."""
        if self.results is None:
            return
        try:
            if not all(x is None or isinstance(x, torch.Tensor) for x in handed):  # autograd is told of symbols, not of numbers
                raise CannotPack("it hands numbers from forward to backward")
            with compat.outside_tracing():
                self.noted = Noted(pack(graphs), unplanned and pack(unplanned, TRACED_META))
        except CannotPack as why:
            self._not_kept(str(why))

    def note_forward(self) -> None:
        """Inside the compiler of forward."""
        if self.noted is not None and self.results is not None:
            try:
                written = self._written()
                self.noted.around = Around.of(self.results[len(written):], written)
            except compat.MoreAround as why:
                self.noted = None
                self._not_kept(str(why))
        if self.found is not None:
            self._check(self.found.around)

    def _written(self) -> tuple[compat.WrittenInput, ...]:
        written = compat.inputs_written_as_traced(len(self.given.values))
        memory = [memory_of(example) for example in self.given.examples]
        if any(memory.count(memory[each.position]) > 1 for each in written):
            raise compat.MoreAround("it changes what shares memory with another input")
        return written

    def _check(self, then: Around) -> None:
        now, why = None, None
        try:
            now = Around.of([x.empty() for x in then.results], self._written())
        except compat.MoreAround as error:
            why = error
        if now != then:
            raise HpmlError("a graph that an earlier launch has compiled is not traced as it was then", f"graph_{self.number}",
                            "run `hpml doctor --clear-cache`, or set HPML_CACHE=0") from why

    def note_backward(self) -> None:
        """Inside the compiler of backward."""
        if self.noted is not None:
            self.noted.writes_over = compat.places_written_over()

    def keep(self, takes: RuntimeMetadata) -> None:
        """Once all is compiled."""
        noted = self.noted
        if noted is None:
            return
        assert noted.around is not None, "forward is compiled before a graph is kept"
        if {each.position for each in noted.around.written} != takes.written:
            self._not_kept("what it changes is not what it was planned to")
            return
        until = float("inf") if self.session.quick is None else time.time() + HOLDS_S
        entry = Entry(takes.without_fakes(), noted.graphs, noted.unplanned, noted.around, noted.writes_over,
                      plan_file.digest_of(takes.agreed()), self._prices(takes.graph_hash), until)
        try:
            with compat.outside_tracing():
                graph_file.put(self._name(), plain_data.dumps(entry))
        except BadInput as error:
            warn_of_cache("what this graph was rewritten to cannot be kept for the next launch", error)

    def _not_kept(self, why: str) -> None:
        log.info("graph_%d is not kept for the next launch: %s", self.number, why)


"""Persistent cache of rewritten graphs: a second launch with the same key skips tracing, planning and rewriting.

An entry has the graphs that are compiled, packed, and all that running them takes: forward and backward, or a program with a
loop over microbatches (`compile.program.step_program`). They are compiled again, which inductor's own cache makes cheap.
AOTAutograd traces a stub (`compile.cache.stub_graph`) instead of the graph, and derives its epilogue from that. This works for
graphs whose epilogue only returns results and copies new values into mutated inputs: `compat.results_as_traced`,
`compat.mutated_inputs_as_traced`. Where the plan is made on demand, its source is cached, too.

Either all ranks use their entries, and these are of one plan, or none does.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

import passes.transforms.comm.low_rank_ops  # noqa: F401 (operators of cached graphs)
from hpml_compiler.compile.cache.graph_cache_key import CacheInputs, Uncacheable, graph_key
from hpml_compiler.compile.cache.lazy_plan import PlanSource
from hpml_compiler.compile.cache.stub_graph import StubResult, returns_new_tensors, stub_of
from hpml_compiler.compile.program.step_program import StepProgram
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata
from hpml_compiler.options import Options
from hpml_compiler.planner.graph import measured_costs
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.plans.cache import graph_database, plan_database
from hpml_compiler.plans.cache.cache_warnings import warn_of_cache
from hpml_compiler.profile.quick_profile_cache import HOLDS_S
from hpml_compiler.runtime.placements.inner_shard import InnerShard
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank
from hpml_compiler.runtime.process.world_group import from_all_ranks, this_rank, world_size
from hpml_compiler.runtime.watchdog.activity_scope import activity
from hpml_compiler.runtime.watchdog.barrier_check import CALLING, require_all_ranks
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from passes import compat
from passes.errors import BadInput, HpmlError
from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.graph.loops.loop_parts import LoopSplit
from passes.serialization import restricted_pickle
from passes.serialization.serialized_graph import TRACED_META, CannotSerialize, check, pack, unpack

log = logging.getLogger("hpml")
KINDS = (RuntimeMetadata, StepProgram, LoopSplit, SingleRank, InnerShard)
"""Classes that the arguments of `keep` and `note` may have: only these, and the classes of their fields, are unpickled."""


@dataclass(frozen=True)
class AOTEpilogue:
    """AOTAutograd's epilogue, as far as it follows from a graph's interface: the same for the graph and for its stub."""

    results: tuple[StubResult, ...]
    written: tuple[compat.MutatedInput, ...]

    @staticmethod
    def of(results: Sequence[torch.Tensor], written: tuple[compat.MutatedInput, ...]) -> AOTEpilogue:
        """Call this inside the compiler of forward; raises compat.UnsupportedEpilogue. results: those of the traced graph."""
        traced = compat.results_as_traced(results)
        return AOTEpilogue(tuple(StubResult.like(x, differentiable) for x, differentiable in traced), written)


@dataclass(frozen=True)
class CachedGraph:
    """An entry of the cache. running: metadata of the runtime wrapper. graphs: graphs to compile, packed. unplanned: source of
    the plan that is made on demand (`compile.cache.lazy_plan`), packed. around: AOTAutograd's epilogue. writes_over: see
    `compat.overwritable_inputs`. plan: digest of the plan, the same on all ranks. prices: digest of the measured costs of `hpml
    profile` that the plan used. until: when the entry expires, in seconds since the epoch."""

    running: RuntimeMetadata
    graphs: bytes
    unplanned: bytes | None
    around: AOTEpilogue
    writes_over: frozenset[int] | None
    plan: str
    prices: str
    until: float


@dataclass
class PendingEntry:
    """The parts of an entry that are known so far, while the graph is compiled."""

    graphs: bytes
    unplanned: bytes | None = None
    around: AOTEpilogue | None = None
    writes_over: frozenset[int] | None = None


@dataclass
class GraphCache:
    """The cache as one graph sees it: reads the entry of an earlier launch and writes the one for the next. All ranks create it
    together, before the graph is traced.

    entry: of the cache, if there is one; `graph` and `restored` then replace tracing. chosen: what `choice` finds on rank 0 for
    the graph's key: a configuration that was chosen for it in an earlier launch.
    """

    gm: GraphModule
    inputs: CacheInputs
    options: Options
    sharing: StepContext | None = None
    """Under a memory budget, the state that the graphs of a step share."""
    choice: Callable[[str], str | None] = lambda key: None
    chosen: str | None = None
    key: str = ""
    entry: CachedGraph | None = None
    noted: PendingEntry | None = None
    results: list[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.session = session.current()
        self.number = len(self.session.graphs) + len(self.session.unplanned)
        self.rank = this_rank()
        self.cluster = local_cluster(self.options, world_size())
        with compat.outside_tracing():
            self.key = self._key()
            found = self._read() if self.key else None
            told, choices = zip(*self._of_all_ranks(((self.key, found and found.plan), self.choice(self.key))), strict=True)
            self.chosen = choices[0]
        self.session.trail.append(self.key or "?")
        if found is not None and all(each == told[0] for each in told):
            self.entry = found
            if self.rank == 0:
                log.info("graph_%d: read from the graph cache; set HPML_CACHE=0 to compile it again", self.number)

    def _of_all_ranks(self, mine: Any) -> list[Any]:
        with activity("looking up this graph in the graph cache"):
            require_all_ranks("compiling a graph", CALLING, every=0)
            return from_all_ranks(mine)

    def _key(self) -> str:
        if not plan_database.is_on():
            return ""
        try:
            if not returns_new_tensors(self.gm):
                raise Uncacheable("it returns non-tensors, or its own inputs")
            return graph_key(self.gm, self.inputs, self.options, self.cluster, self.session.trail, self.sharing)
        except Uncacheable as why:
            self._log_uncached(str(why))
            return ""

    def _read(self) -> CachedGraph | None:
        try:
            packed = graph_database.get(self._name())
        except BadInput as error:
            warn_of_cache("the graph cache cannot be read; graphs are compiled again", error)
            return None
        if packed is None:
            return None
        try:
            found = restricted_pickle.loads(packed, restricted_pickle.classes_of(CachedGraph, *KINDS))
            if type(found) is not CachedGraph:
                raise restricted_pickle.NotPlain(f"it is of type {type(found).__name__}")
            check(found.graphs, *KINDS)
            if found.unplanned is not None:
                check(found.unplanned, PlanSource)
        except restricted_pickle.NotPlain as error:
            warn_of_cache("the cached entry of this graph is ignored; the graph is compiled again", BadInput(
                f"the graph cache has an entry that hpml did not write: {error}", str(graph_database.path()),
                "run `hpml doctor --clear-cache`, and find out who wrote it"))
            return None
        return found if time.time() < found.until and found.prices == self._prices(found.running.graph_hash) else None

    def _name(self) -> str:
        return f"{self.key} {self.rank}"

    def _prices(self, graph_hash: str) -> str:
        return measured_costs.digest(self.options, self.cluster, graph_hash)

    # With an entry of an earlier launch.

    @property
    def graph(self) -> GraphModule:
        """The graph for AOTAutograd to trace: a stub of the entry, if there is one."""
        return self.gm if self.entry is None else stub_of(self.gm, self.entry.around.results, self.entry.around.written)

    def restored(self) -> Any:
        """The graphs of the entry, as `note` got them."""
        assert self.entry is not None, "no cached entry to restore"
        mode = compat.fake_mode()
        with compat.outside_tracing(), torch.no_grad():
            return unpack(self.entry.graphs, mode, *KINDS)

    @property
    def writes_over(self) -> frozenset[int] | None:
        """Inputs that backward may overwrite, from the entry; None if unknown. Compiling must not allow more than then."""
        return None if self.entry is None else self.entry.writes_over

    # For the next launch.

    def note_results(self, whole: GraphModule, outputs: int | None) -> None:
        """Note the results before the rewrite. whole: the traced graph. outputs: number of forward's results; None for all."""
        if self.key and self.entry is None:
            nodes = returned_nodes(whole)[:outputs]
            self.results = [node.meta["val"] for node in nodes if node is not None]

    def note(self, graphs: Any, handed: Iterable[Any] = (), unplanned: PlanSource | None = None) -> None:
        """Pack the graphs to compile, or data with graphs in it, before compiling changes them. handed: fakes of the
        values that forward saves for backward."""
        if self.results is None:
            return
        try:
            if not all(x is None or isinstance(x, torch.Tensor) for x in handed):  # autograd takes symbols, not numbers
                raise CannotSerialize("its forward saves numbers for backward")
            with compat.outside_tracing():
                self.noted = PendingEntry(pack(graphs), unplanned and pack(unplanned, TRACED_META))
        except CannotSerialize as why:
            self._log_uncached(str(why))

    def note_forward(self) -> None:
        """Note the epilogue; call this inside the compiler of forward."""
        if self.noted is not None and self.results is not None:
            try:
                written = self._written()
                self.noted.around = AOTEpilogue.of(self.results[len(written):], written)
            except compat.UnsupportedEpilogue as why:
                self.noted = None
                self._log_uncached(str(why))
        if self.entry is not None:
            self._check(self.entry.around)

    def _written(self) -> tuple[compat.MutatedInput, ...]:
        written = compat.mutated_inputs_as_traced(len(self.inputs.values))
        memory = [memory_of(example) for example in self.inputs.examples]
        if any(memory.count(memory[each.position]) > 1 for each in written):
            raise compat.UnsupportedEpilogue("it mutates an input that shares memory with another input")
        return written

    def _check(self, then: AOTEpilogue) -> None:
        now, why = None, None
        try:
            now = AOTEpilogue.of([x.empty() for x in then.results], self._written())
        except compat.UnsupportedEpilogue as error:
            why = error
        if now != then:
            raise HpmlError("the graph differs from its entry in the graph cache", f"graph_{self.number}",
                            "run `hpml doctor --clear-cache`, or set HPML_CACHE=0") from why

    def note_backward(self) -> None:
        """Note the inputs that may be overwritten; call this inside the compiler of backward."""
        if self.noted is not None:
            self.noted.writes_over = compat.overwritable_inputs()

    def keep(self, takes: RuntimeMetadata) -> None:
        """Write the entry, once all is compiled."""
        noted = self.noted
        if noted is None:
            return
        assert noted.around is not None, "forward must be compiled before the graph is cached"
        if {each.position for each in noted.around.written} != takes.written:
            self._log_uncached("it mutates other inputs than planned")
            return
        until = float("inf") if self.session.quick is None else time.time() + HOLDS_S
        entry = CachedGraph(takes.without_fakes(), noted.graphs, noted.unplanned, noted.around, noted.writes_over,
                            plan_database.digest_of(takes.agreed()), self._prices(takes.graph_hash), until)
        try:
            with compat.outside_tracing():
                graph_database.put(self._name(), restricted_pickle.dumps(entry))
        except BadInput as error:
            warn_of_cache("this graph cannot be cached; the next launch compiles it again", error)

    def _log_uncached(self, why: str) -> None:
        log.info("graph_%d is not cached: %s", self.number, why)


"""Decide on all ranks together: they profile their devices, rank 0 searches or reuses a plan, and the others receive it."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from hpml_compiler.compile.decide.plan_entry import PlanEntry
from hpml_compiler.compile.inputs.graph_inputs import GraphInputs
from hpml_compiler.compile.lower.compile_timer import compile_phase
from hpml_compiler.options import Options
from hpml_compiler.planner.decide import Search
from hpml_compiler.planner.graph.same_structure import structural_hash
from hpml_compiler.planner.pipeline.pp_axis import same_mesh
from hpml_compiler.planner.search.placement_request import PlacementRequest
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.profile import quick_profile
from hpml_compiler.runtime.consistency.rank_sync import from_rank_0
from hpml_compiler.runtime.process.world_group import world_size
from hpml_compiler.session import session
from passes import compat
from passes.errors import BadInput
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster

log = logging.getLogger("hpml")
T = TypeVar("T")


def look_once(find: Callable[[], AnalyzedGraph], options: Options, cluster: Cluster) -> None:
    """Before the first plan, all ranks run the quick profile where there is no other. find: analyzes the graph for planning."""
    current = session.current()
    if current.looked:
        return
    current.looked = True
    if quick_profile.wanted(options, cluster, lambda: find().hash()):
        start, annotated = time.perf_counter(), find()
        current.quick = quick_profile.take_quick_profile(annotated, cluster)
        annotated.seconds["look"] = time.perf_counter() - start


class RunningRanks:
    """The ranks of a run, as `hpml_compiler.planner.decide` sees them. structure: structural hash of the latest graph, on rank
    0, by which later graphs find its plan."""

    running = True

    def __init__(self, inputs: GraphInputs, entry: PlanEntry):
        self.inputs, self.entry, self.session, self.size, self.structure = inputs, entry, session.current(), world_size(), ""

    def agreed(self, what: str, find: Callable[[], T]) -> T:
        with self.entry.doing("solve", what):
            return from_rank_0(find)

    def place(self, request: PlacementRequest, search: Search) -> tuple[PlanResult, GraphPlan]:
        with compile_phase("plan", f"{self.entry.name}: planning", {}):  # the plan has the times of looking and solving
            look_once(lambda: request.annotated, request.options, request.cluster)
            planned, record = from_rank_0(lambda: self._found(request, search))
        return planned, record.model_copy(update={"frame": compat.frame_being_compiled()})

    def _found(self, request: PlacementRequest, search: Search) -> tuple[PlanResult, GraphPlan]:
        self.structure = key = structural_hash(request.annotated, request.options, request.rows)
        planned, record = search(replace(request, fixed_mesh=self._mesh_in_use(request), quick=self.session.quick,
                                         like=self.session.decided.get(key)))
        self.session.decided.setdefault(key, planned.record)
        return planned, record

    def _mesh_in_use(self, request: PlacementRequest) -> dict[str, int] | None:
        """The mesh that this graph has to share: that of its placed parameters, or of the graphs before it."""
        mesh, wanted = self.inputs.mesh, request.options.mesh
        if mesh is None or wanted is None or same_mesh(wanted, mesh):
            return mesh
        if request.annotated.interface.stored:
            raise BadInput(f"parameters are already placed on the mesh {mesh}, but the options request {wanted}",
                           where="options['mesh']", next_step="use the same mesh in all torch.compile calls of a model")
        return None

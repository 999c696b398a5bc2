"""What the ranks agree to do with one graph: all look at the devices, rank 0 decides, or obeys a plan, and all receive it."""
from __future__ import annotations

import functools
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from hpml_compiler.compile import session
from hpml_compiler.compile.agreement import from_rank_0
from hpml_compiler.compile.graph_inputs import GraphInputs
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.options import Options
from hpml_compiler.planning.fits import fitting
from hpml_compiler.planning.in_trials import plan_in_trials, remembered, remembered_within
from hpml_compiler.planning.plan_graph import Planned, plan_graph
from hpml_compiler.planning.remembered import memory_of
from hpml_compiler.planning.reuse import structure
from hpml_compiler.planning.room import Sharing
from hpml_compiler.planning.stage_axes import same_mesh
from hpml_compiler.planning.trial import Trial
from hpml_compiler.profile import quick
from passes import compat
from passes.errors import BadInput
from passes.graph.annotated import Annotated
from passes.machine.cluster import Cluster
from passes.partition.lifetimes import THROUGHOUT, Lifetimes
from passes.solve.allowance import Allowance


class Planner:
    """Of one graph. sharing: what it shares with the others of its step, under a budget. cluster: what it is planned for, if
    that is not all devices. lifetimes: when bytes are counted, without a budget. structure: what later graphs find the plan by,
    on rank 0, once it is made."""

    def __init__(self, annotated: Annotated, inputs: GraphInputs, options: Options, sharing: Sharing | None,
                 forward_outputs: int | None, cluster: Cluster | None = None, lifetimes: Lifetimes = THROUGHOUT):
        self.annotated, self.inputs, self.options, self.sharing = annotated, inputs, options, sharing
        self.forward_outputs, self.lifetimes = forward_outputs, lifetimes
        self.structure = ""
        self.whole = cluster is None and lifetimes == THROUGHOUT  # neither in stages nor in microbatches
        self.session, self.cluster = session.current(), cluster or local_cluster(options, dist.get_world_size())

    def agreed(self) -> Planned:
        """All ranks call this together."""
        self._look()
        planned = from_rank_0(self._plan)
        return replace(planned, record=planned.record.model_copy(update={"frame": compat.frame_being_compiled()}))

    def trial(self, sharing: Sharing) -> Trial:
        assert self.forward_outputs is not None, "what is kept is kept for backward"
        return Trial(self.annotated, self.options, self.cluster, self.forward_outputs,
                     self.inputs.kept_gradients(self.annotated, self.forward_outputs), frozenset(self.inputs.written), sharing)

    def _look(self) -> None:
        """Before the first plan, all ranks measure a little where there is no profile."""
        if self.session.looked:
            return
        self.session.looked = True
        if quick.wanted(self.options, self.cluster, self.annotated.hash()):
            start = time.perf_counter()
            self.session.quick = quick.look(self.annotated, self.cluster)
            self.annotated.seconds["look"] = time.perf_counter() - start

    def _plan(self) -> Planned:
        annotated, options, given, pinned = self.annotated, self.options, self.options.load_plan(), None
        if given is not None and annotated.interface.training:
            pinned = given.check(annotated.hash(), torch.__version__, dist.get_world_size()).kept
        names = {p: n for n, p in annotated.interface.positions.items()}
        rows = frozenset(names[p] for p in self.inputs.rows if p in names)
        self.structure = key = structure(annotated, options, rows)
        mesh, quick = self._mesh_in_use(), self.session.quick
        like = self.session.decided.get(key)
        plan = functools.partial(
            plan_graph, annotated, options, self.cluster, fixed_mesh=mesh, name=f"graph_{len(self.session.graphs)}", rows=rows,
            given=given, like=like, quick=quick, lifetimes=self.lifetimes)
        trial = None
        if self.sharing is not None and self.forward_outputs is not None:
            trial = self.trial(self.sharing)
        if given is not None or like is not None:
            planned = plan() if trial is None else plan_in_trials(plan, trial, Allowance(options.time_limit), pinned)
        else:
            memory = memory_of(annotated, options, self.cluster, quick, mesh, sorted(rows))
            if trial is None and self.whole:
                search = functools.partial(remembered_within, memory, plan)
                planned = fitting(search, lambda found: found, options, self.cluster, hurried=True)
            else:
                planned = remembered(memory, plan, trial)
        self.session.decided.setdefault(key, planned.record)
        return planned

    def _mesh_in_use(self) -> dict[str, int] | None:
        """The mesh that this graph has to share: that of its placed parameters, or of the graphs before it."""
        mesh = self.inputs.mesh
        if mesh is None or self.options.mesh is None or same_mesh(self.options.mesh, mesh):
            return mesh
        if self.annotated.interface.stored:
            raise BadInput(f"parameters are placed on the mesh {mesh} already, and {self.options.mesh} is asked for",
                           where="options['mesh']", next_step="give one mesh for all that a model is compiled for")
        return None

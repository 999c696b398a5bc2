"""A traced model under a byte budget, without a run: its graphs decide one after another, as the ranks of a run would."""
from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from hpml_compiler.options import Options
from hpml_compiler.planning.fits import limit_of
from hpml_compiler.planning.in_trials import plan_in_trials, remembered
from hpml_compiler.planning.kept import with_kept
from hpml_compiler.planning.making import making
from hpml_compiler.planning.one_device import keep_on_one_device, plan_of_one_device
from hpml_compiler.planning.plan_graph import Planned, plan_graph
from hpml_compiler.planning.remembered import memory_of
from hpml_compiler.planning.room import Held, Sharing, held_whole
from hpml_compiler.planning.shorten import Folded
from hpml_compiler.planning.trial import Trial
from hpml_compiler.plans.plan import Plan
from passes import compat
from passes.graph.annotated import Annotated
from passes.graph.copied import copied
from passes.machine.cluster import Cluster
from passes.solve.allowance import Allowance
from passes.tracing.trace import Traced


@dataclass
class Budgeted:
    """trained: bytes of the model's parameters that are trained, by name: the optimizer holds all of them. graphs: what those
    that were planned already hold, by name. given: a plan to obey."""

    options: Options
    cluster: Cluster
    trained: Mapping[str, float]
    given: Plan | None = None
    graphs: dict[str, Held] = field(default_factory=dict)
    allowance: Allowance | None = None
    """For all graphs that are still to be planned; None: the options' time limit for each."""
    met: set[str] = field(default_factory=set)
    """Names of the parameters that the graphs so far had."""

    def plan(self, name: str, traced: Traced, annotated: Annotated, fixed_mesh: Mapping[str, int] | None,
             folded: Folded | None = None) -> Planned:
        """traced: as it is before any pass; annotated: the same, ready to be planned. folded: of which deeper model it has a
        few layers. Raises Infeasible, with the smallest budget that is known to work, and `NotLinear` or `NotAlike` where
        these layers do not stand for all."""
        sharing = self.sharing(name, traced, annotated, folded)
        pinned = None if self.given is None else self.given.check(
            annotated.hash(), torch.__version__, self.cluster.world_size).kept
        within = self.allowance or Allowance(self.options.time_limit)
        if self.cluster.world_size == 1:
            held = sharing.whole
            kept = keep_on_one_device(copied(traced.gm), traced.forward_outputs, sharing, self.cluster, pinned, folded)
            planned = plan_of_one_device(annotated, kept, sharing.options, self.cluster, name, folded)
        else:
            trial = self.trial(traced, annotated, sharing, folded)
            plan = functools.partial(plan_graph, annotated, sharing.options, self.cluster, name=name, given=self.given,
                                     fixed_mesh=fixed_mesh)
            if folded is not None:
                plan = functools.partial(plan, shorter=folded.shorter, further=folded.further)
            if self.given is not None or folded is not None:
                planned = plan_in_trials(plan, trial, within, pinned)
            else:
                memory = memory_of(annotated, sharing.options, self.cluster, None, fixed_mesh)
                planned = remembered(memory, plan, trial, within)
            assert planned.kept is not None, "it was tried out"
            kept, held = planned.kept, trial.held(planned)
            record = planned.record if folded is None else folded.of_all_layers(planned.record)
            planned = replace(planned, record=with_kept(record, kept, sharing.options))
        self.graphs[name] = replace(held, saved=kept.saved_bytes)
        return planned

    def trial(self, traced: Traced, annotated: Annotated, sharing: Sharing, folded: Folded | None = None) -> Trial:
        gradients = tuple(traced.forward_outputs + k for k, position in enumerate(annotated.interface.positions.values())
                          if position in traced.leaves)
        return Trial(annotated, sharing.options, self.cluster, traced.forward_outputs, gradients,
                     frozenset(compat.inputs_written(traced.gm)), sharing, self.cluster.device.kind, folded)

    def sharing(self, name: str, traced: Traced, annotated: Annotated, folded: Folded | None = None) -> Sharing:
        options = self.options.model_copy(update={"memory_budget": limit_of(self.options, self.cluster)})
        own = {annotated.interface.names[value.name]: value for value in annotated.graph.values if value.kind == "parameter"}
        new = [value for parameter, value in own.items() if parameter not in self.met]
        self.met.update(own)
        trained, frozen = ([float(value.bytes) for value in new if value.trainable == wanted] for wanted in (True, False))
        if folded is not None:  # all of them are of this graph
            trained = list(self.trained.values())
            self.met.update(self.trained)
        unseen = sum(nbytes for parameter, nbytes in self.trained.items() if parameter not in self.met)
        return Sharing(held_whole(name, trained, frozen, options), options, making(options, self.cluster.device.kind),
                       name, self.graphs, unseen, traced.breaks)

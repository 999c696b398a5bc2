"""Plan of one graph in the session: entered when it is decided, or made on demand; and the monitor of its calls."""
from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from hpml_compiler.compile.cache.lazy_plan import LazyPlan, PlanSource
from hpml_compiler.compile.lower.compile_timer import compile_phase
from hpml_compiler.compile.wrapper.runtime_wrapper import Watched
from hpml_compiler.monitor.hooks import WatchedGraph
from hpml_compiler.options import Options
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, schedule_of
from hpml_compiler.planner.stage_warnings import warn_of_empty_stages
from hpml_compiler.planner.step_decision import StepDecision
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import BlocksReport, GraphPlan, MeshAttempt
from hpml_compiler.plans.unsplit_graph import why_not_split
from hpml_compiler.runtime.process.world_group import this_rank
from hpml_compiler.runtime.watchdog import heartbeat
from hpml_compiler.session import session
from hpml_compiler.session.run_monitor import monitor_of, watch_of
from passes import compat
from passes.hardware.cluster import Cluster

log = logging.getLogger("hpml")


class PlanEntry:
    """name: of the graph. cluster: of all ranks. record: the plan; None where it is made on demand. seconds: compile time by
    phase, which becomes part of the plan. watched: the graph's calls as the monitor sees them."""

    def __init__(self, name: str, options: Options, cluster: Cluster):
        self.name, self.options, self.cluster, self.session = name, options, cluster, session.current()
        self.record: GraphPlan | None = None
        self.seconds: dict[str, float] = {}
        self.watched: Watched = None

    @property
    def step_us(self) -> float:
        """Predicted time of the step; 0 where the plan is made on demand."""
        return 0.0 if self.record is None else self.record.predicted.step_time_us

    def doing(self, what: str, text: str) -> compile_phase:
        """Context that adds its time to the compile times, and says what is done."""
        return compile_phase(what, f"{self.name}: {text}", self.seconds)

    def enter(self, record: GraphPlan, rejected: Iterable[MeshAttempt], training: bool) -> None:
        """Enter a plan that was decided at once."""
        solving = record.seconds.get("solve", 0.0)
        record.seconds.update(self.seconds)
        if solving:
            record.seconds["solve"] = self.seconds.get("solve", 0.0) + solving
        self.record, self.seconds = record, record.seconds
        self.session.enter(record, self.options, self.cluster, rejected)
        if not training:
            return
        self.session.mesh = dict(record.mesh)
        if why := why_not_split(record):
            heartbeat.watch_neighbor()
            log.log(logging.DEBUG if this_rank() else logging.WARNING, "%s", why)

    def change(self, record: GraphPlan | None) -> None:
        """Replace the record of a plan that was decided at once, now that more is known."""
        if record is None or self.record is None:
            return
        graphs = self.session.graphs
        graphs[next(k for k, each in enumerate(graphs) if each is self.record)] = record
        self.record, self.seconds = record, record.seconds

    def watch(self) -> None:
        """Complete the entry of a plan that was decided at once."""
        if self.record is None:
            return
        if self.options.monitor:
            self.watched = WatchedGraph(monitor_of(self.options), self.record)
        session.save_plan()

    def enter_later(self, source: PlanSource | bytes, decision: StepDecision, reports: Mapping[str, BlocksReport]) -> None:
        """Enter a plan that is made on demand. source: the graph and the decision, or the same packed. reports: of regional
        compilation, which are filled in while the graph is compiled."""
        found = decision.stages
        if found is not None:
            if this_rank() == 0:
                warn_of_empty_stages(self.name, found)
            self.session.stage_starts[compat.frame_being_compiled()] = decision.stage_starts
            self.session.stages[self.session.next_name()] = found
        self.session.enter(LazyPlan(source, self.seconds, reports), self.options, self.cluster)
        session.save_plan()
        if found is not None and self.options.monitor:
            place = self.session.device_mesh(decision.mesh).get_local_rank(PP_AXIS)
            table = schedule_of(self.options, decision.microbatch_count)
            self.watched = watch_of(self.name, table, place, found, self.options)

    def note_stage(self, planned: PlanResult) -> None:
        """Note the times of planning the ranks of a stage; the plan of the pipeline is made on demand."""
        for what in planned.record.seconds.keys() & {"look", "solve"}:
            self.seconds[what] = self.seconds.get(what, 0.0) + planned.record.seconds[what]
        if this_rank() == 0:
            log.info("%s: each stage on the mesh %s, planned in %.2f s", self.name, planned.mesh,
                     sum(planned.record.seconds.values()))

    def log_plan(self, unruled: Mapping[str, Sequence[str]]) -> None:
        record = self.record
        if record is not None and this_rank() == 0:
            log.info("%s: mesh %s, predicted step %.3f ms, planned in %.2f s", record.name, dict(record.mesh),
                     record.predicted.step_time_us / 1e3, sum(record.seconds.values()))
            warn_replicated(unruled)


def warn_replicated(unruled: Mapping[str, Sequence[str]]) -> None:
    """Warn of operators that are replicated for want of a sharding rule. unruled: their calls."""
    for target, nodes in unruled.items():
        log.warning("%s has no sharding rule and is replicated, at %s; see \"Your first op rule\" in the documentation", target,
                    ", ".join(nodes[:3]))

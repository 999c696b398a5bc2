"""The plan of a pipelined run: each stage's blocks, memory and sends, and that the simulated schedule is the one that runs."""
from __future__ import annotations

from functools import partial

import pytest
import torch

import hpml_compiler
from hpml_compiler.monitor.stage_events import measured_schedule
from hpml_compiler.plan_api.model_plan import Plan, PlanMismatch
from hpml_compiler.runtime.process.device_clock import HostClock
from hpml_compiler.runtime.program.stage_timer import recording
from hpml_compiler.simulate import simulate
from hpml_compiler.simulate.plan_prices import PlannedPrices, RepricedPlan
from hpml_compiler.simulate.plan_step_graph import step_graph
from hpml_compiler.simulate.scheduled_stages import times_of_stages
from hpml_compiler.visualize.description.module_classes import module_classes
from hpml_compiler.visualize.drawings.graphviz_drawing import digraph
from hpml_compiler.visualize.plan_table import stages_text
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.pipeline.pipeline_schedule import make_schedule
from tests.helpers.frozen import fresh, in_turn
from tests.helpers.plans import plan_of_ranks
from tests.hpml_compiler.compile.test_pipeline_parallel import Tied, batch


def recorded(rank, schedule, virtual, microbatches):
    fresh()
    torch.manual_seed(0)
    model = Tied()
    call = torch.compile(model, backend="hpml", options={
        "mesh": {"pp": 2}, "compiler": "eager", "microbatches": microbatches, "schedule": schedule, "virtual_stages": virtual})
    with recording(HostClock()) as loops:
        call(*batch())[0].backward()
    plan = plan_of_ranks()
    (graph,) = plan.graphs
    pipe = graph.pipeline
    check_recorded(rank, loops, pipe)
    if rank == 0:
        check_plan(plan, graph, pipe, model, schedule, virtual, microbatches)
        check_planned(plan, schedule, virtual, microbatches)
    if schedule == "1f1b":
        check_obeyed(rank, plan)


def check_plan(plan, graph, pipe, model, schedule, virtual, microbatches):
    assert plan.mesh == {"pp": 2} and pipe is not None and Plan.from_json(plan.to_json()) == plan
    assert (pipe.ranks, pipe.microbatches, len(pipe.stages)) == (2, microbatches, 2 * virtual)
    assert (graph.microbatches is None) == (microbatches == 1)
    owned = [name for stage in pipe.stages for name in stage.parameters]
    assert sorted(owned) == sorted(graph.parameters)  # each is whole in one stage, though the table is read in two
    assert sum(stage.parameter_bytes for stage in pipe.stages) == 4 * sum(p.numel() for p in model.parameters())
    rows = 8 // microbatches
    for k, stage in enumerate(pipe.stages):
        # On go the residual stream and what each block multiplies by, float32 of width 8, and back their gradients.
        on, back = ([each.bytes for each in stage.sends if each.backward == way] for way in (False, True))
        before, after = (each is not None and each.rank != stage.rank for each in neighbors(pipe.stages, k))
        assert on == ([4 * 8 * rows] * 2 if after else []) and len(back) == (2 if before else 0)
        assert stage.saved_bytes > 0 and stage.forward_us > 0 and stage.backward_us > 0
        if pipe.schedule == "zbv":  # the first one's backward is waited for by nobody
            assert stage.weight_us == stage.backward_us if k == 0 else 0 < stage.weight_us < stage.backward_us
    if schedule == "1f1b":
        assert [stage.in_flight for stage in pipe.stages] == [min(2, microbatches), 1]
    played = simulate(plan, contention=1.0)  # as when the cut was made: sends slow nothing down
    assert played.step_us == pytest.approx(graph.predicted.step_time_us)
    assert len(played.ranks_of_lane) == 2 and played.peak_bytes <= graph.memory.peak
    assert "stages on 2 ranks" in stages_text(plan) and "stages on 2 ranks" in plan.table()
    source = digraph(plan).source  # a box for each stage, in order
    places = [source.index(f"g0_stage{k} [") for k in range(len(pipe.stages))]
    assert places == sorted(places) and all(f"g0_stage{k} -> g0_stage{k + 1}" in source for k in range(len(pipe.stages) - 1))
    for each in module_classes(graph):
        assert each.stage is not None and set(each.runs) <= set(pipe.stages[each.stage].operations)
    faster = simulate(plan, "1x2:h100-80g")
    again = simulate(plan, contention=1.0, recompute="full")
    assert faster.step_us < played.step_us and again.compute_us > played.compute_us
    check_all_is_counted(plan)


def check_all_is_counted(plan):
    """What stages take is what the calls and moves of the whole plan take, each once, and what is on it has all axes."""
    (graph,) = plan.graphs
    listed = [name for stage in graph.pipeline.stages for name in stage.operations]
    assert sorted(listed) == sorted(graph.operations)
    mesh = mesh_from_pin(plan.mesh, Cluster.parse(plan.cluster))
    prices = PlannedPrices(graph, RepricedPlan(graph, MeshPrices(mesh, 2)))
    step = step_graph(graph, prices)
    times = times_of_stages(graph, [stage.operations for stage in graph.pipeline.stages], prices)
    in_loop = sum(call.us for call in step.calls if call.when == "loop")
    moved = sum(hop.us for leg in step.legs for hop in leg.hops)
    assert sum(each.forward_us + each.backward_us + each.reduce_us for each in times) == pytest.approx(in_loop + moved)
    assert sum(each.around_us for each in times) == pytest.approx(sum(call.us for call in step.calls if call.when != "loop"))
    for each in graph.parameters.values():
        assert len(each.placements) == (len(plan.mesh) if len(plan.mesh) > 1 else 0)


def split(rank, mesh, microbatches):
    fresh()
    torch.manual_seed(0)
    options = {"mesh": mesh, "compiler": "eager", "microbatches": microbatches}
    model = Tied()
    torch.compile(model, backend="hpml", options=options)(*batch())[0].backward()
    plan = plan_of_ranks()
    if rank == 0:
        assert plan.mesh == mesh and Plan.from_json(plan.to_json()) == plan
        check_all_is_counted(plan)
        torch.manual_seed(0)
        planned = hpml_compiler.plan(Tied(), batch(), Cluster.local(4, "cpu"), **options)
        (graph,), (other,) = plan.graphs, planned.graphs
        assert (other.pipeline, other.memory, other.predicted, other.parameters) == (
            graph.pipeline, graph.memory, graph.predicted, graph.parameters)
        # Of part of the rows a time is taken in proportion to that on the cluster by its name, which is not quite this machine.
        assert simulate(plan, contention=1.0, overlap=False).step_us == pytest.approx(graph.predicted.step_time_us, rel=0.02)
        assert "stages on 2 ranks" in plan.table() and "g0_stage1 [" in digraph(plan).source
    check_obeyed(rank, plan)


def check_obeyed(rank, plan):
    """A plan alone says stages, microbatches and placements, of a run as of what is planned without one."""
    fresh()
    torch.manual_seed(0)
    torch.compile(Tied(), backend="hpml", options={"plan": plan, "compiler": "eager"})(*batch())[0].backward()
    if rank == 0:
        again = hpml_compiler.last_plan()
        (graph,), (other,) = plan.graphs, again.graphs
        assert (again.mesh, other.pipeline, other.decisions) == (plan.mesh, graph.pipeline, graph.decisions)
        planned = hpml_compiler.plan(Tied(), batch(), Cluster.local(plan.world_size, "cpu"), plan=plan, compiler="eager")
        assert planned.graphs[0].pipeline == graph.pipeline
        with pytest.raises(PlanMismatch):
            hpml_compiler.plan(Tied(), [each[:4] for each in batch()], Cluster.local(plan.world_size, "cpu"), plan=plan)


def test_stages_that_are_split_have_a_plan(launch):
    cases = ({"pp": 2, "dp": 2}, 4), ({"tp": 2, "pp": 2}, 1)
    launch(in_turn, 4, [partial(split, mesh=mesh, microbatches=microbatches) for mesh, microbatches in cases])


def neighbors(stages, k):
    return (stages[k - 1] if k else None), (stages[k + 1] if k + 1 < len(stages) else None)


def check_planned(ran, schedule, virtual, microbatches):
    """Without ranks, the same plan."""
    torch.manual_seed(0)
    planned = hpml_compiler.plan(Tied(), batch(), Cluster.local(2, "cpu"), mesh={"pp": 2}, compiler="eager",
                                 microbatches=microbatches, schedule=schedule, virtual_stages=virtual)
    (graph,), (other,) = ran.graphs, planned.graphs
    assert planned.mesh == ran.mesh and other.pipeline == graph.pipeline and other.memory == graph.memory
    assert (other.microbatches, other.predicted.step_time_us) == (graph.microbatches, graph.predicted.step_time_us)


def check_recorded(rank, loops, pipe):
    """What ran is what the schedule says, and so are the bytes that were sent in the loop; more when it is over."""
    events = measured_schedule(loops)
    for lane in range(2):
        own = [event for event in events if event.lane == lane]
        assert len(own) == len(make_schedule(pipe.schedule, 2, pipe.microbatches, pipe.virtual_stages).computed(lane))
        assert all(a.stop_us <= b.start_us for a, b in zip(own, own[1:])) and all(a.start_us < a.stop_us for a in own)
    table = make_schedule(pipe.schedule, 2, pipe.microbatches, pipe.virtual_stages)
    done = [each for loop in loops for each in loop.done()]
    assert tuple(each.action for each in done) == table.computed(rank)
    assert all(0 <= a.start_us <= a.start_us + a.waited_us < a.end_us for a in done) and all(a.work_us > 0 for a in done)
    assert sum(loop.took_us for loop in loops) > sum(each.work_us for each in done)
    planned = sum(each.bytes for stage in pipe.stages if stage.rank == rank for each in stage.sends) * pipe.microbatches
    assert sum(loop.sent_bytes for loop in loops) >= planned > 0


def test_a_run_through_stages_records_them(launch):
    launch(in_turn, 2, [partial(recorded, schedule=schedule, virtual=virtual, microbatches=microbatches) for
                        schedule, virtual, microbatches in (
                            ("1f1b", 1, 4), ("gpipe", 1, 1), ("interleaved", 2, 2), ("zbv", 2, 4))])

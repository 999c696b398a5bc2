"""Quick profile of the devices for runs without a profile, so that the first plan uses costs of this machine.

Takes about a second on all ranks together: the largest operations of the graph, memory-bound kernels, the optimizer, and
each kind of collective at a few sizes. The results scale the roofline model by one factor per kind of kernel; operations of
one kind keep the roofline's proportions, since single short measurements would be too noisy. It is valid for a day
(`hpml_compiler.profile.quick_profile_cache`). `hpml profile` measures longer, takes precedence, and does not expire.
"""
from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import measured_costs
from hpml_compiler.profile import quick_profile_cache
from hpml_compiler.profile.collective_timing import measured_group, time_collective
from hpml_compiler.profile.heavy_operations import operation_calls
from hpml_compiler.profile.model_profile import one_device
from hpml_compiler.profile.quick_profile_cache import QuickProfile
from hpml_compiler.profile.runtime_overhead import COLLECTIVES, between_us, collective_calls
from hpml_compiler.profile.strategy_variants import StrategyVariant, variants
from hpml_compiler.profile.timing import TimedCall, in_rounds
from hpml_compiler.profile.training_steps import optimizer_step
from hpml_compiler.runtime.consistency.rank_sync import from_rank_0
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.out_of_memory import room_bytes
from hpml_compiler.runtime.process.world_group import from_all_ranks
from hpml_compiler.visualize.formatting import format_bytes
from passes import compat
from passes.cost_model import OptimizerModel, RooflineCost
from passes.cost_model.measured.measured_kernels import OPTIMIZER
from passes.cost_model.measured.measurement_key import measurement_key_of
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.placement_graph import Operation, PlacementGraph
from passes.hardware.cluster import Cluster

log = logging.getLogger("hpml")

SECONDS = 0.3
"""Time for all calls but collectives; at least five rounds are run."""
COLLECTIVE_SECONDS = 0.03
COLLECTIVE_SIZES = (2**12, 2**18, 2**22)
MOST_OPERATIONS = 4
"""Operations that are timed per kind."""
LONG_US, LONG_CALL_ROUNDS = 500.0, 3
"""Operations with a predicted time above LONG_US are timed LONG_CALL_ROUNDS times: long calls vary less."""
LARGEST_BYTES, LONGEST_US = 2**26, 2e4
"""Limits of the operations that are timed: larger ones would take long, or would not fit on one device."""
POINTWISE_ELEMENTS = {"cpu": (2**16, 2**20, 2**22), "cuda": (2**22, 2**23, 2**24)}
"""By device type: on a GPU, the time of a smaller kernel is that of its launch, which is charged apart."""
POINTWISE_CALLS = {"cpu": 1, "cuda": 16}
"""The fewest calls of a sample: the host waits for the device once in a sample."""
ROOM_BYTES = {"cpu": 2**29, "cuda": 2**31}
"""Memory that has to be left on each device for a quick profile to be taken."""
OPTIMIZER_TENSORS, OPTIMIZER_ELEMENTS = 8, {"cpu": 2**19, "cuda": 2**21}


def wanted(options: Options, cluster: Cluster, graph_hash: Callable[[], str]) -> bool:
    """True if the costs of this run's plan would come from data sheets alone. The same on every rank.

    HPML_QUICK_PROFILE=0 in the environment disables quick profiles, for the fastest start or reproducible plans.
    """
    if options.costs != "auto" or options.cluster is not None or options.plan is not None:
        return False
    if os.environ.get("HPML_QUICK_PROFILE", "1") == "0":
        return False
    return from_rank_0(lambda: measured_costs.load(options, cluster, graph_hash()) is None)


def take_quick_profile(annotated: AnalyzedGraph, cluster: Cluster) -> CachedMeasurements | None:
    """Measure, or load the quick profile of the last day; None if a device has too little memory left to measure. All ranks
    must call it, inside or outside of a Dynamo backend, and get the same result."""
    start, key = time.perf_counter(), quick_profile_cache.profile_key(annotated.hash(), cluster)
    found = from_rank_0(lambda: quick_profile_cache.cached_profile(key))
    before = found is not None
    if found is None:
        with _plain_tensors():
            room = min(from_all_ranks(room_bytes()))
            found = _measure(annotated) if room >= ROOM_BYTES[device_type()] else None
        if found is None:
            if dist.get_rank() == 0:
                log.info("no quick profile was taken, since a device has only %s left: costs are those of data sheets; "
                         "`hpml profile` measures them", format_bytes(room))
            return None
        if dist.get_rank() == 0:
            quick_profile_cache.store_profile(key, found)
    if dist.get_rank() == 0:
        factors = ", ".join(f"{kind} {factor:.2f}" for kind, factor in found.factors.items())
        when = (f"cached, {max(0.0, time.time() - found.made) / 3600:.1f} h old" if before
                else f"took {time.perf_counter() - start:.1f} s")
        log.info("no profile of these devices; a quick profile (%s) measured kernel times relative to the roofline: %s. "
                 "`hpml profile` measures more", when, factors)
    return found.measured()


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Context manager with real tensors, outside of tracing, autograd and autocast; the script's RNG state is restored."""
    kind = device_type()
    devices = [torch.cuda.current_device()] if kind == "cuda" else []
    with (compat.outside_tracing(), torch.random.fork_rng(devices, device_type="cuda"), torch.no_grad(),
          torch.autocast(kind, enabled=False)):
        yield


def _measure(annotated: AnalyzedGraph) -> QuickProfile:
    _, mesh = one_device()
    roofline = RooflineCost(mesh.device, mesh)
    expected = _heaviest(annotated, roofline)
    heavy, _ = operation_calls(variant for variant, _, _ in expected.values())
    # Long calls depend little on the state of the caches, and a warm-up call would double the time.
    heavy = {key: replace(timed, warm=0, rounds=LONG_CALL_ROUNDS) if expected[key][2] > LONG_US else timed
             for key, timed in heavy.items()}
    adam = RooflineCost(mesh.device, mesh, OptimizerModel(4, 4, 2 * 4))
    elements = OPTIMIZER_ELEMENTS[device_type()]
    parameters = [torch.zeros(elements, dtype=torch.float32, device=device_type())] * OPTIMIZER_TENSORS
    with torch.enable_grad():
        step = optimizer_step(parameters)
    calls = {**heavy, **_pointwise_calls(), "optimizer": TimedCall(step), **collective_calls()}
    us = {name: statistics.median(some) for name, some in in_rounds(calls, SECONDS).items()}
    launch_us = mesh.device.launch_latency_us
    ratios: dict[str, list[float]] = {}
    for key, (_, kind, predicted_us) in expected.items():
        if key in us:
            ratios.setdefault(kind, []).append(us[key] / predicted_us)
    for elements in POINTWISE_ELEMENTS[device_type()]:
        predicted_us = roofline.compute_us(0.0, 12.0 * elements, "float32", "pointwise") - launch_us
        ratios.setdefault("pointwise", []).append(us[f"add {elements}"] / predicted_us)
    factors = {kind: statistics.median(some) for kind, some in ratios.items()}
    factors[OPTIMIZER] = us["optimizer"] / (OPTIMIZER_TENSORS * adam.optimizer_us(parameters[0].numel()))
    assert dist.group.WORLD is not None, "there is a process group"
    ranks = list(range(dist.get_world_size()))
    group = measured_group(len(ranks), 1)
    timings = [timing.point for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
               for timing in time_collective(kind, dist.group.WORLD, ranks, group, sizes=COLLECTIVE_SIZES,
                                             seconds=COLLECTIVE_SECONDS)]
    in_step_us = between_us(us) if all(k in us for k in (*COLLECTIVES, "chain", "products")) else 0.0
    return QuickProfile.of(factors, in_step_us, timings, group)


def _heaviest(annotated: AnalyzedGraph, roofline: RooflineCost) -> dict[str, tuple[StrategyVariant, str, float]]:
    """The unsharded operations with the largest predicted time of each kind: key -> (variant, kind, predicted µs)."""
    graph: PlacementGraph = annotated.graph
    found: dict[str, tuple[Operation, str, float]] = {}
    for op in graph.operations:
        if not op.heavy or not op.outputs:
            continue
        key = measurement_key_of(graph, op, ((),) * len(op.inputs), ((),) * len(op.outputs), ())
        values = [graph.values[v] for v in (*op.inputs, *op.outputs)]
        nbytes, kind = float(sum(v.bytes for v in values)), op.kind
        us = roofline.compute_us(op.flops, nbytes, graph.values[op.outputs[0]].spec.dtype, kind)
        us -= roofline.device.launch_latency_us
        if nbytes <= LARGEST_BYTES and 0 < us <= LONGEST_US:
            found.setdefault(key, (op, kind, us))
    by_kind: dict[str, list[str]] = {}
    for key, (_, kind, _us) in sorted(found.items(), key=lambda item: (-item[1][2], item[0])):
        by_kind.setdefault(kind, []).append(key)
    chosen = {key for keys in by_kind.values() for key in keys[:MOST_OPERATIONS]}
    calls = variants(annotated.gm, graph, 1)
    return {key: (calls[key], found[key][1], found[key][2]) for key in found if key in chosen and key in calls}


def _pointwise_calls() -> dict[str, TimedCall]:
    """Memory-bound kernels: additions of two tensors into a third."""
    calls: dict[str, TimedCall] = {}
    for elements in POINTWISE_ELEMENTS[device_type()]:
        a, b, c = torch.ones(3, elements, dtype=torch.float32, device=device_type()).unbind()
        call: Callable[[], Any] = lambda a=a, b=b, c=c: torch.add(a, b, out=c)  # noqa: E731
        calls[f"add {elements}"] = TimedCall(call, repeats=max(POINTWISE_CALLS[device_type()], 2**20 // elements),
                                              warm=1)
    return calls

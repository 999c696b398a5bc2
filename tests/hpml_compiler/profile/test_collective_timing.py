"""The collectives of real ranks, timed; their curves, fitted to some sizes, predict the sizes between."""
from __future__ import annotations

import math
import statistics
from random import Random

import pytest
import torch.distributed as dist

from hpml_compiler.profile.collective_timing import (
    CollectiveTiming,
    _process_group,
    _turns,
    measured_group,
    mesh_groups,
    profile_collectives,
    time_collective,
)
from passes.cost_model import COLLECTIVE_KINDS
from passes.cost_model.measured.measured_collectives import MeasuredCollectives, MeasuredGroup, fit_points, read_points
from passes.cost_model.measured.measurement_cache import MeasurementCache, device_key
from passes.cost_model.measured.piecewise_linear import fit_piecewise, relative_errors
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin

KIB = 1024
SEEN = [KIB * size for size in (1, 4, 16, 64, 256, 512, 1024, 2048, 4096)]
UNSEEN = [KIB * size for size in (2, 32, 128, 384, 768, 1536, 3072)]  # most of them where the bytes take the time
PAIR = MeasuredGroup(2, 1, 2, 2, "gloo")


def quartiles(kind: str, attempts: int = 3, steady: float = 0.1) -> tuple[dict[int, float], float]:
    """Lower quartiles by size, of the steadiest of a few measurements, and how far the halves of that one disagree.

    Medians would do on an idle machine; the lower quartile is what other programs disturb less. Even and odd calls
    are halves that should agree: measured again until they do, or until the attempts are used up.
    """
    best: tuple[dict[int, float], float] = {}, math.inf
    for attempt in range(attempts):
        timings = time_collective(kind, dist.group.WORLD, range(2), PAIR, sizes=SEEN + UNSEEN, seconds=1.5, seed=attempt)
        halves = [[_quartile(t.samples_us[half::2]) for t in timings] for half in (0, 1)]
        apart = statistics.mean(abs(math.log(a / b)) for a, b in zip(*halves))
        if apart < best[1]:
            best = {t.nbytes: _quartile(t.samples_us) for t in timings}, apart
        if best[1] <= steady:
            break
    return best


def _quartile(samples: tuple[float, ...]) -> float:
    return statistics.quantiles(samples, n=4, method="inclusive")[0]


def _measure(rank: int, kind: str) -> tuple[dict[int, float], float]:
    return quartiles(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "send_recv"])
def test_sizes_not_seen_are_predicted(launch, kind):
    (us, apart), other = launch(_measure, args=(kind,), timeout_s=110)
    assert (us, apart) == other, "every rank has the times of the slowest"
    fit = fit_piecewise(SEEN, [us[size] for size in SEEN])
    errors = relative_errors(fit, UNSEEN, [us[size] for size in UNSEEN])
    print(f"{kind}: alpha {fit.alpha_us:.0f} µs, beta {fit.beta_us_per_byte * 2**20:.0f} µs/MiB, {fit.pieces} pieces, "
          f"errors {', '.join(f'{e:.3f}' for e in errors)}, halves {apart:.3f} apart")
    assert fit.alpha_us > 0 and fit.beta_us_per_byte > 0
    assert statistics.median(errors) <= 0.2, f"{kind}: {errors}, halves of the measurement {apart:.0%} apart"


def _profile(rank: int, path: str) -> list[CollectiveTiming]:
    with MeasurementCache(path) as cache:
        return profile_collectives(cache, seconds=0.01, sizes=[1024, 4096, 65536])


def test_a_world_of_four_is_profiled_into_the_cache(launch, tmp_path):
    path = tmp_path / "cache.sqlite"
    timings, *others = launch(_profile, world_size=4, args=(path,), timeout_s=110)
    assert all(other == timings for other in others)
    points = read_points(MeasurementCache(path), device_key_of_one_thread())
    assert sorted(points, key=str) == sorted((t.point for t in timings), key=str)
    groups = {(p.group.size, p.group.stride) for p in points}
    assert groups == {(2, 1), (4, 1), (2, 2)} and {p.kind for p in points} == set(COLLECTIVE_KINDS)
    prices = MeasuredCollectives(points, lambda group: group.axis("cpu"), world_size=4)
    axis = mesh_from_pin({"all": 4}, Cluster.local(4, "cpu")).axis("all")
    whole = {kind: fit for (kind, group), fit in fit_points(points).items() if group.size == 4}
    for kind, fit in whole.items():
        assert prices.collective_us(kind, axis, 50_000) == pytest.approx(fit(50_000))


def device_key_of_one_thread() -> str:
    """Of the ranks that `launch` starts."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return device_key()
    finally:
        torch.set_num_threads(threads)


def _shapes(rank: int) -> dict[str, list[int]]:
    found = {}
    for size, stride in [(2, 1), (2, 2), (4, 1)]:
        with _process_group(size, stride) as (group, ranks):
            assert dist.get_process_group_ranks(group) == ranks and rank in ranks
            timings = time_collective("all_gather", group, ranks, measured_group(size, stride), sizes=[1000, 4096],
                                      seconds=0.01)
            found[f"{size} {stride}"] = ranks
            assert [t.nbytes for t in timings] == [1008 if size == 4 else 1000, 4096]
            assert all(len(t.samples_us) >= 7 and min(t.samples_us) > 0 for t in timings)
    return found


def test_groups_are_those_of_mesh_axes(launch):
    found = launch(_shapes, world_size=4)
    for stride, names in [(1, "b"), (2, "a")]:
        mesh = mesh_from_pin({"a": 2, "b": 2}, Cluster.local(4, "cpu"))
        for group in mesh.groups(names):
            assert all(found[rank][f"2 {stride}"] == group for rank in group)
    assert all(row["4 1"] == [0, 1, 2, 3] for row in found)


@pytest.mark.parametrize(("world", "groups"), [
    (2, [(2, 1)]),
    (4, [(2, 1), (4, 1), (2, 2)]),
    (6, [(2, 1), (3, 1), (6, 1), (3, 2), (2, 3)]),
])
def test_every_axis_of_a_mesh_has_its_groups(world, groups):
    assert mesh_groups(world) == groups


def test_turns_spread_the_calls_evenly():
    counts = {10: 12, 20: 4, 30: 7}
    turns = list(_turns(counts, Random(0)))
    assert {length: sum(length in turn for turn in turns) for length in counts} == counts
    assert len(turns) == 12 and [20 in turn for turn in turns] == [False, False, True] * 4
    assert turns == list(_turns(counts, Random(0))) != list(_turns(counts, Random(1)))


def test_the_measurement_has_the_median_and_the_lower_quartile():
    measurement = CollectiveTiming("broadcast", PAIR, 1024, tuple(float(v) for v in range(1, 102))).measurement
    assert (measurement.median_us, measurement.runs) == (51.0, 101)
    assert measurement.extra["lower_quartile_us"] == 26.0
    assert measurement.spread == pytest.approx(91 / 11)
    assert measurement.extra["collective"] == "broadcast" and measurement.extra["bytes"] == 1024


def test_one_process_has_no_collectives(tmp_path):
    with pytest.raises(BadInput) as error:
        profile_collectives(MeasurementCache(tmp_path / "cache.sqlite"))
    assert "torchrun" in error.value.next_step

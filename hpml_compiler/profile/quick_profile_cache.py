"""Persistent cache of quick profiles; an entry is valid for a day, for the same graph and devices.

Entries expire since the machine may have been busy when it was measured. `HPML_CACHE=0` disables the cache.
"""
from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, ValidationError

from hpml_compiler.plans.cache import plan_database
from hpml_compiler.plans.cache.cache_warnings import warn_of_cache
from hpml_compiler.plans.record_fields import Record
from hpml_compiler.runtime.process.compute_device import device_type
from passes.cost_model.measured.measured_collectives import CollectivePoint, MeasuredCollectives, MeasuredGroup
from passes.cost_model.measured.measured_kernels import DeviceMeasurements
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.errors import BadInput
from passes.hardware.cluster import Cluster

log = logging.getLogger("hpml")

HOLDS_S = 24 * 3600.0


class CollectiveTime(Record):
    """Time in µs of one collective of `bytes` bytes over all ranks."""

    kind: str
    bytes: int
    us: float


class QuickProfile(Record):
    """Result of a quick profile. factors: measured over predicted time, by kind of kernel. collective_us: extra time of a
    collective in a step. made: seconds since 1970."""

    made: float
    factors: dict[str, float]
    collective_us: float
    collectives: Annotated[tuple[CollectiveTime, ...], Field(strict=False)]
    group: Annotated[tuple[int, int, int, int, str], Field(strict=False)]

    @staticmethod
    def of(factors: dict[str, float], collective_us: float, points: Sequence[CollectivePoint],
           group: MeasuredGroup) -> QuickProfile:
        return QuickProfile(
            made=time.time(), factors=factors, collective_us=collective_us,
            collectives=tuple(CollectiveTime(kind=point.kind, bytes=point.nbytes, us=point.us) for point in points),
            group=(group.size, group.stride, group.world_size, group.devices_per_node, group.backend))

    def measured(self) -> CachedMeasurements:
        kind, group = device_type(), MeasuredGroup(*self.group)
        name = torch.cuda.get_device_name() if kind == "cuda" else ""
        points = [CollectivePoint(each.kind, group, each.bytes, each.us) for each in self.collectives]
        return CachedMeasurements(DeviceMeasurements(factors=self.factors, collective_us=self.collective_us),
                                  MeasuredCollectives(points, lambda g: g.axis(kind, name), group.world_size))


def profile_key(graph_hash: str, cluster: Cluster) -> str:
    """Cache key of a quick profile: the graph, the devices and the code's version."""
    kind = device_type()
    name = torch.cuda.get_device_name() if kind == "cuda" else platform.processor()
    return plan_database.digest_of(["a look", graph_hash, cluster, platform.node(), os.cpu_count(), name,
                                    torch.get_num_threads(),
                                    torch.__version__, plan_database.planners_code()])


def cached_profile(key: str) -> QuickProfile | None:
    """Load the quick profile of the last day; None if there is none, or it cannot be read."""
    if not plan_database.is_on():
        return None
    try:
        text = plan_database.get(key)
        found = None if text is None else QuickProfile.model_validate_json(text)
    except BadInput as error:
        warn_of_cache("the cached quick profile cannot be read; hpml measures again", error)
        return None
    except ValidationError:
        log.warning("the cached quick profile is corrupt; hpml measures again")
        return None
    return found if found is not None and 0 <= time.time() - found.made < HOLDS_S else None


def store_profile(key: str, look: QuickProfile) -> None:
    """Store a quick profile for launches of the next day."""
    if not plan_database.is_on():
        return
    try:
        plan_database.put(key, look.model_dump_json())
    except BadInput as error:
        warn_of_cache("the quick profile cannot be cached; the next launch measures again", error)

"""What one process has decided so far: the mesh in use, and the plans made on it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from hpml_compiler.options import Options
from hpml_compiler.plan_records import GraphPlan, MeshAttempt
from hpml_compiler.pricing import Measured
from hpml_compiler.runtime.devices import device_type, forget
from passes import compat
from passes.layouts import Layout
from passes.rules.base import REPLICATE
from passes.transform.collectives import MeshGroups

if TYPE_CHECKING:
    from hpml_compiler.monitor.monitor import Monitor


@dataclass
class Session:
    """`mesh` is set by the first graph whose parameters are placed: all graphs of a model share one mesh."""

    mesh: dict[str, int] | None = None
    graphs: list[GraphPlan] = field(default_factory=list)
    decided: dict[str, GraphPlan] = field(default_factory=dict)
    """On rank 0, which plans: by structure (`hpml_compiler.reuse`), the first plan of a graph of that structure."""
    rejected: list[MeshAttempt] = field(default_factory=list)
    options: Options = field(default_factory=lambda: Options.parse(None))
    cluster: str = ""
    looked: bool = False
    quick: Measured | None = None
    """What a quick look at these devices found (`hpml_compiler.profile.quick`), where there is no profile."""
    device_meshes: dict[tuple, DeviceMesh] = field(default_factory=dict)
    monitor: Monitor | None = None

    def device_mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        """The DeviceMesh of these axes; made once, by all ranks together."""
        key = (tuple(axes.items()), id(dist.group.WORLD))
        if key not in self.device_meshes:
            with compat.outside_tracing():
                self.device_meshes[key] = init_device_mesh(
                    device_type(), tuple(axes.values()), mesh_dim_names=tuple(axes)
                )
        return self.device_meshes[key]

    def groups(self, axes: Mapping[str, int]) -> MeshGroups:
        mesh = self.device_mesh(axes)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "every rank is in the mesh"
        return MeshGroups(
            tuple(axes.values()), tuple(coordinate), tuple(mesh.get_group(name).group_name for name in axes)
        )


_session = Session()


def current() -> Session:
    return _session


def reset() -> None:
    """Forget the mesh and the plans: the next compilation starts afresh (a new process group, another model)."""
    global _session
    _session = Session()
    forget()


def to_dtensor(layout: Layout) -> tuple[Placement, ...]:
    """Placements of a stored parameter; only whole dims (factor 0) are ever stored in parts."""
    return tuple(Replicate() if p == REPLICATE else Shard(p[0]) for p in layout)  # type: ignore[arg-type]


def from_dtensor(placements: tuple[Placement, ...]) -> Layout:
    return tuple((p.dim, 0) if isinstance(p, Shard) else REPLICATE for p in placements)

"""Mesh of a pipeline: the `pp` axis for its stages, and other axes that each stage is sharded over.

All stages have meshes of one shape, so a value has the same local shape at both ends of a send, which goes along `pp` alone.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, axes_of_stage, is_split
from hpml_compiler.session import session
from passes.graph.decision import Hop, Route
from passes.graph.layouts import Layout, StoredLayout
from passes.hardware.axis import device_axes
from passes.op_rules.base import REPLICATE
from passes.transforms.shard.redistributor import MeshGroups


@dataclass(frozen=True)
class PipelineMesh:
    """sizes: of all axes, with `pp`, in rank order. A value that is replicated along `pp` has a layout over the others."""

    sizes: Mapping[str, int]

    @property
    def axes(self) -> dict[str, int]:
        return axes_of_stage(self.sizes)

    @property
    def is_split(self) -> bool:
        """True if a stage has more than one rank."""
        return is_split(self.sizes)

    def groups(self) -> MeshGroups:
        """This rank's coordinates and process groups in the mesh of its stage."""
        mesh = session.current().device_mesh(self.sizes)
        return MeshGroups(device_axes(self.axes), tuple(mesh.get_local_rank(name) for name in self.axes),
                          session.names_of_groups(mesh, self.axes))

    def place(self) -> int:
        """This rank's place in the pipeline."""
        return session.current().device_mesh(self.sizes).get_local_rank(PP_AXIS)

    def over_all(self, layout: Layout) -> Layout:
        """The layout over all axes of the mesh, replicated along `pp`."""
        rest = iter(layout)
        return tuple(REPLICATE if name == PP_AXIS else next(rest) for name in self.sizes)

    def route_over_all(self, route: Route) -> Route:
        return Route(route.value, self.over_all(route.source),
                     tuple(Hop(self.over_all(hop.layout), hop.phase) for hop in route.hops))


def over_stage(layout: StoredLayout, mesh: Mapping[str, int]) -> StoredLayout | None:
    """Restrict a stored layout over all axes of a mesh to those of a stage; None if it is sharded along `pp`."""
    if any(p != REPLICATE for p, name in zip(layout, mesh, strict=True) if name == PP_AXIS):
        return None
    return tuple(p for p, name in zip(layout, mesh, strict=True) if name != PP_AXIS)

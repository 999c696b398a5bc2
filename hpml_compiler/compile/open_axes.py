"""Options of graphs after the one that decided about them: the axes that a pinned mesh left open, and what came with them."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.options import Options
from hpml_compiler.planner.joint.open_decisions import leaves_axes_open
from hpml_compiler.runtime.process.world_group import world_size
from hpml_compiler.session import session
from passes.errors import BadInput


def as_placed(given: Sequence[Any], options: Options) -> Options:
    """The options with what was decided for the mesh that parameters among the inputs are placed on. A mesh that is pinned in
    part is this mesh, or that of the graphs so far."""
    current = session.current()
    for x in given:
        if isinstance(x, torch.nn.Parameter) and isinstance(x, DTensor):
            return _on_mesh(dict(zip(x.device_mesh.mesh_dim_names or (), x.device_mesh.shape, strict=False)), options)
    if current.mesh is not None and leaves_axes_open(options, world_size()):
        return _on_mesh(current.mesh, options)
    return options


def _on_mesh(mesh: Mapping[str, int], options: Options) -> Options:
    chosen = session.current().chosen.get(tuple(mesh.items()))
    if chosen is not None:
        return chosen.options(options)
    if leaves_axes_open(options, world_size()) and all(mesh.get(name, 1) == n for name, n in (options.mesh or {}).items()):
        return options.with_chosen({"mesh": dict(mesh)})
    return options


def open_axes(options: Options, why: str) -> BadInput:
    """The error where axes are open and nothing decides about them. why: nothing is decided about the graph; "" if unknown."""
    reason = why or ("options['plan'] needs a mesh with all axes" if options.plan is not None else
                     "the first training step decides about the others")
    pinned = math.prod((options.mesh or {}).values())
    what = f"the mesh {options.mesh} has {pinned} of {world_size()} ranks" if options.mesh else (
        f"the schedule {options.schedule_name} is pinned, but no mesh")
    return BadInput(f"{what}: {reason}", "options['mesh']",
                    "give the mesh all its axes, or call the model for training first")

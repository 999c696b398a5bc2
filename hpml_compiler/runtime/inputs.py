"""Graph inputs that are placed already look to the compiler like any other: whole plain tensors."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hpml_compiler.runtime.parameters import parameter_name
from hpml_compiler.runtime.placed import PlacedTensor
from passes import compat
from passes.errors import BadInput


@dataclass(frozen=True)
class InputPlacement:
    """Where a graph input lives already: one placement per axis of the mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


def take_out_markers(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], fake_mode: Any = None,
                     ) -> tuple[torch.fx.GraphModule, list[Any], dict[int, InputPlacement]]:
    """Make the placed inputs of a Dynamo graph whole and plain.

    Parameters in a recompile, and rows of a batch (`hpml_compiler.distribute`), arrive as placed tensors. Dynamo traced
    them as whole tensors, so the nodes of the graph need no change: the class is the marker. Returned are the graph,
    the example inputs with a fake plain tensor of the whole shape for each (sizes stay symbolic where Dynamo made
    them so), and position -> placement. At run time `Installed.locals` takes their local parts.
    Raises BadInput for a DTensor that was made by the script itself.
    """
    fake_mode = fake_mode or compat.fake_mode()
    examples = list(example_inputs)
    placed: dict[int, InputPlacement] = {}
    sources = compat.input_sources(gm)
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = examples[position]
        if not isinstance(value, DTensor):
            continue
        if not isinstance(value, PlacedTensor):
            users = ", ".join(str(user) for user in node.users)
            raise BadInput("the script made this DTensor itself, and hpml cannot plan around it",
                           f"graph input {parameter_name(sources[position])}, used by {users}",
                           "leave the model and its batch on one device, or give rows with hpml_compiler.distribute")
        placed[position] = InputPlacement(value.device_mesh, tuple(value.placements))
        examples[position] = node.meta["example_value"] = _whole_fake(node.meta["example_value"], value, fake_mode)
    return gm, examples, placed


def _whole_fake(fake: torch.Tensor, value: PlacedTensor, fake_mode: Any) -> torch.Tensor:
    with compat.plain_torch_functions(), fake_mode:
        plain: Any = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
        plain.requires_grad_(value.requires_grad)
    if isinstance(value, nn.Parameter):
        plain._is_param = True
    return plain

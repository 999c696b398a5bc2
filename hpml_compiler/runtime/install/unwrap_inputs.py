"""Present placed graph inputs to the compiler as whole plain tensors."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from hpml_compiler.runtime.batch.batch_shard import BatchShard
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.placements.inner_shard import blocks_along
from passes import compat
from passes.errors import BadInput
from passes.graph.graph_signature import parameter_name


@dataclass(frozen=True)
class InputPlacement:
    """Current placement of a graph input, one per axis of the mesh. rows: it is a batch shard. output: it is an output of
    another graph. whole: it has been gathered."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    rows: bool = False
    output: bool = False
    whole: bool = False

    def can_be_planned(self, shape: Sequence[int], mesh: DeviceMesh | None) -> bool:
        """True if a plan on this mesh can start from the parts as they are: even shards, no Partial.

        Other inputs are gathered when the graph is called.
        """
        if mesh is None or self.mesh is not mesh or any(p.is_partial() for p in self.placements):
            return False
        if any(p.is_shard() and type(p) is not Shard for p in self.placements):
            return False
        return all(size % blocks_along(dim, mesh, self.placements) == 0 for dim, size in enumerate(shape))


def take_out_markers(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], fake_mode: Any = None,
                     ) -> tuple[torch.fx.GraphModule, list[Any], dict[int, InputPlacement]]:
    """Replace the placed example inputs of a Dynamo graph by whole plain fakes, and return their placements.

    Parameters in a recompile, batch shards (`hpml_compiler.distribute`), and values computed from parameters (a mask, the
    weights of another model) arrive as placed tensors. Dynamo traced them as whole tensors, so the graph's nodes need no
    change. Returns the graph, the example inputs with a fake plain tensor of the whole shape for each of these (sizes stay
    symbolic where Dynamo made them so), and position -> placement. At run time `BoundParameters.locals` takes their local
    parts, or gathers them.
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
            raise BadInput("hpml does not support DTensors that the script created",
                           f"graph input {parameter_name(sources[position])}, used by {users}",
                           "pass plain tensors, or shard the batch with hpml_compiler.distribute")
        placed[position] = InputPlacement(value.device_mesh, tuple(value.placements), isinstance(value, BatchShard),
                                          isinstance(value, LazyOutput),
                                          isinstance(value, LazyOutput) and value.is_whole)
        examples[position] = node.meta["example_value"] = _whole_fake(node.meta["example_value"], value, fake_mode)
    return gm, examples, placed


def copy_for_set_data(gm: torch.fx.GraphModule) -> None:
    """Rewrite `p.data = value` to copy the value into `p` where shapes are equal, which works for placed parameters.

    Dynamo traces it as `set_`, since torch 2.15 as `shallow_copy_data_`, which AOTAutograd rejects.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and compat.sets_data(node.target) and len(node.args) == 2 and len(
                {tuple(x.meta["example_value"].shape) for x in node.args}) == 1:
            node.target = torch.Tensor.copy_
    gm.recompile()


def _whole_fake(fake: torch.Tensor, value: PlacedTensor, fake_mode: Any) -> torch.Tensor:
    with compat.plain_torch_functions(), fake_mode:
        plain: Any = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
        plain.requires_grad_(value.requires_grad)
        if value.requires_grad and not value.is_leaf:  # AOTAutograd hides a leaf's change in place from autograd
            with torch.enable_grad():
                changed = plain.clone()
            plain = changed if changed.stride() == plain.stride() else plain
    if isinstance(value, nn.Parameter):
        plain._is_param = True
    return plain

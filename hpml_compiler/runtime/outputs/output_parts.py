"""Outputs of other graphs as arguments of a graph that takes them as they are sharded."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.placements.gather_parts import gathered_from_parts
from hpml_compiler.runtime.placements.shard_and_gather import local_shard, to_full_tensor
from hpml_compiler.runtime.program.second_derivatives import marked
from passes import compat


class OutputParts:
    """specs: position of an argument -> DTensorSpec of the parts that the graph was compiled for."""

    def __init__(self, specs: Mapping[int, Any]) -> None:
        self._specs = specs

    def take(self, args: Sequence[Any], local: list[Any]) -> None:
        """Put this rank's parts into `local`, connected to the outputs by autograd. An output that was gathered since, or that
        another graph made in another placement, is sliced."""
        if not self._specs:
            return
        tracked = torch.is_grad_enabled()
        connected: list[int] = []
        for position, spec in self._specs.items():
            output = args[position]
            if not _is_in_parts(output, spec):
                whole = to_full_tensor(output)
                local[position] = _PartOfWhole.apply(whole, spec) if tracked and whole.requires_grad else _part(whole, spec)
            elif tracked and output.requires_grad:
                connected.append(position)
            else:
                local[position] = output._local_tensor.detach()
            if (use := getattr(vars(output).get("shared"), "use", None)) is not None:
                use.on_shards += 1
        if connected:
            parts = _PartsOfOutputs.apply([self._specs[k] for k in connected], *[args[k] for k in connected])
            for position, part in zip(connected, parts, strict=True):
                local[position] = part


def output_of_part(node: Any, number: int) -> tuple[tuple[Any, int], Any] | None:
    """The autograd edge of an output that a graph took in parts, and the spec of these, for an edge that leads to its part;
    None for other edges."""
    if not hasattr(node, "_forward_cls") or compat.autograd_function(node) is not _PartsOfOutputs:
        return None
    return node.next_functions[number], node.specs[number]


def _is_in_parts(output: Any, spec: Any) -> bool:
    return (isinstance(output, LazyOutput) and not output.is_whole and output._spec.placements == spec.placements
            and output._spec.mesh == spec.mesh)


def _part(whole: torch.Tensor, spec: Any) -> torch.Tensor:
    return local_shard(whole.detach(), spec.mesh, spec.placements)


class _PartsOfOutputs(torch.autograd.Function):
    """Autograd function from sharded outputs to their parts. The gradients arrive at the outputs in the same placements, also
    where the script gathers an output in between."""

    @staticmethod
    def forward(ctx: Any, specs: Sequence[Any], *outputs: Any) -> tuple[torch.Tensor, ...]:
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return tuple([output._local_tensor.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        with compat.plain_torch_functions():
            return (None, *[None if gradient is None else marked(gradient, lambda part, spec=spec: compat.make_dtensor(
                PlacedTensor, part, spec)) for gradient, spec in zip(gradients, ctx.specs, strict=True)])


class _PartOfWhole(torch.autograd.Function):
    """Autograd function from a whole tensor, equal on all ranks, to this rank's part; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, spec: Any) -> torch.Tensor:
        ctx.spec = spec
        return _part(whole, spec)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return marked(gradient, lambda part: gathered_from_parts(part, ctx.spec)), None

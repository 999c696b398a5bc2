"""Calls that an operator consists of, forward and backward, as the backend traces them, with the values that they get."""
from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx

from passes import compat
from passes.compat import OpOverload, pytree
from passes.op_rules.opaque_calls import is_opaque
from passes.tracing.joint_trace import decompositions
from passes.transforms.cleanup.normalization import normalize
from tests.passes.op_rules.families.harness import Sample


class _Stop(BaseException):
    """Ends a trace whose graph is there."""


@dataclass
class Traced:
    """A graph and values of its inputs: those of a sample, and random tangents."""

    gm: fx.GraphModule
    values: list[Any]


def trace(function: Callable[..., Any], tensors: Sequence[torch.Tensor], compiler: str = "inductor") -> Traced:
    """The joint graph of a function of tensors, or its forward graph where nothing has a gradient."""
    found: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, _: Any, **kwargs: Any) -> Any:
        found.append(joint)
        raise _Stop

    def inference(gm: fx.GraphModule, _: Any) -> Any:
        found.append(gm)
        return make_boxed_func(gm.forward)

    leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    try:
        with warnings.catch_warnings(), compat.without_wrong_decompositions():
            warnings.simplefilter("ignore")
            aot_function(function, fw_compiler=inference, partition_fn=partition, inference_compiler=inference,
                         decompositions=decompositions(compiler))(*leaves)
    except _Stop:
        pass
    (gm,) = found
    values: list[Any] = [t.detach().clone() if _alone(t) else t.detach() for t in tensors]
    placeholders = gm.graph.find_nodes(op="placeholder")
    tangents = [node for node in placeholders if node.name.startswith("tangents")]
    # Before the tensors come tokens, which keep assertions and other effects in order.
    values = [torch.empty(0)] * (len(placeholders) - len(tangents) - len(values)) + values
    values += [torch.randn(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype) for node in tangents]
    normalize(gm, compat.fake_mode_of(gm))
    return Traced(gm, values)


def _alone(t: torch.Tensor) -> bool:
    """Whether nothing else lies in a tensor's memory, which `as_strided` could read."""
    return t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.itemsize


class _Recorder(fx.Interpreter):
    """Notes every call with the values that it gets."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm)
        self.calls: list[tuple[fx.Node, Sample]] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and isinstance(n.target, OpOverload) and not is_opaque(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.calls.append((n, Sample(n.target, tuple(args), dict(kwargs), values=_has_values(n.target))))
        return super().run_node(n)


def _has_values(target: OpOverload) -> bool:
    return "empty" not in str(target) and torch.Tag.nondeterministic_seeded not in target.tags


def calls(traced: Traced) -> list[Sample]:
    recorder = _Recorder(traced.gm)
    torch.manual_seed(0)
    recorder.run(*traced.values)
    return [sample for _, sample in recorder.calls]


def key_of(sample: Sample) -> tuple:
    """Equal for calls that differ in values of tensors alone."""
    def told(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return ("tensor", tuple(x.shape), x.stride(), str(x.dtype))
        return repr(x)

    return str(sample.target), tuple(map(told, pytree.tree_leaves((sample.args, dict(sample.kwargs))))), repr(
        pytree.tree_flatten((sample.args, dict(sample.kwargs)))[1])

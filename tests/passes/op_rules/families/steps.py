"""One training step of a model in the zoo, as graphs with values for their inputs."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx, nn

from passes import compat
from passes.graph.graph_signature import GraphInput, graph_inputs
from tests.passes.op_rules.families.zoo import MODELS


@dataclass(frozen=True)
class Step:
    """A joint graph in double precision. values: of its inputs; tangents are random. inputs: those of the Dynamo graph."""

    gm: fx.GraphModule
    values: list[Any]
    inputs: list[GraphInput]
    forward_outputs: int


@functools.cache
def traced(name: str) -> list[Step]:
    """One step per graph that Dynamo makes of the model. The graphs are shared: whoever changes one breaks the others."""
    torch.manual_seed(0)
    return steps_of(*MODELS[name]())


def steps_of(model: nn.Module, batch: dict[str, Any]) -> list[Step]:
    """The same of any model, which becomes one of double precision."""
    joints: list[tuple[fx.GraphModule, list[GraphInput], int]] = []
    described: list[list[GraphInput]] = []
    values: list[list[Any]] = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        joints.append((joint, described[-1], num_fwd_outputs))
        return compat.default_partition(joint, inputs, num_fwd_outputs, None)

    def forward(gm: fx.GraphModule, _: Any) -> Any:
        def record(*args: Any) -> Any:
            values.append([a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args])
            return gm(*args)

        return make_boxed_func(record)

    model.double()
    batch = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    traces = compat.aot_autograd(
        fw_compiler=forward, bw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition,
        inference_compiler=lambda gm, _: make_boxed_func(gm.forward), decompositions=compat.inductor_decompositions(),
    )

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        described.append(graph_inputs(gm, examples))
        return traces(gm, examples)

    torch.compiler.reset()
    with compat.quiet_dynamo():
        torch.compile(model, backend=backend, dynamic=False)(**batch)
    torch.compiler.reset()
    steps = []
    for (joint, inputs, forward_outputs), own in zip(joints, values, strict=True):
        tangents = joint.graph.find_nodes(op="placeholder")[len(own) :]
        assert all(n.name.startswith("tangents") for n in tangents)
        own += [torch.randn(tuple(n.meta["val"].shape), dtype=n.meta["val"].dtype) for n in tangents]
        steps.append(Step(joint, own, inputs, forward_outputs))
    return steps

"""One training step of a model in the zoo, as graphs with values for their inputs."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx

from passes import compat
from tests.passes.rules.zoo import MODELS


@dataclass(frozen=True)
class Step:
    """A joint graph in double precision. values: of its inputs; tangents are random."""

    gm: fx.GraphModule
    values: list[Any]


@functools.cache
def traced(name: str) -> list[Step]:
    """One step per graph that Dynamo makes of the model. The graphs are shared: whoever changes one breaks the others."""
    joints: list[fx.GraphModule] = []
    values: list[list[Any]] = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        joints.append(joint)
        return compat.default_partition(joint, inputs, num_fwd_outputs, None)

    def forward(gm: fx.GraphModule, _: Any) -> Any:
        def record(*args: Any) -> Any:
            values.append([a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args])
            return gm(*args)

        return make_boxed_func(record)

    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.double()
    batch = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    backend = compat.aot_autograd(
        fw_compiler=forward, bw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition,
        inference_compiler=lambda gm, _: make_boxed_func(gm.forward), decompositions=compat.inductor_decompositions(),
    )
    torch.compiler.reset()
    with compat.quiet_dynamo():
        torch.compile(model, backend=backend, dynamic=False)(**batch)
    torch.compiler.reset()
    steps = []
    for joint, own in zip(joints, values, strict=True):
        tangents = joint.graph.find_nodes(op="placeholder")[len(own) :]
        assert all(n.name.startswith("tangents") for n in tangents)
        own += [torch.randn(tuple(n.meta["val"].shape), dtype=n.meta["val"].dtype) for n in tangents]
        steps.append(Step(joint, own))
    return steps

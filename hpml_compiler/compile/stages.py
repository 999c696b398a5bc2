"""A stage of a pipeline as two callables, compiled on the rank that runs it."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile.lowering import Lowering, takes_list, values_of
from hpml_compiler.runtime.stages import Half, StageCalls
from passes.graph.copied import copied
from passes.graph.nodes import returned_nodes
from passes.presets import one_stage
from passes.transform.split_stages import StageGraph


def lower_stage(graph: StageGraph, compiler: str) -> StageCalls:
    """Forward is compiled now. Backward is, too, when it first runs: how what forward saves lies in memory is known then."""
    joint = copied(graph.gm)
    one_stage(compiler, graph.forward_outputs)(joint)
    lowering = Lowering(compiler)
    forward, backward = lowering.partition(joint, values_of(joint), graph.forward_outputs, None)
    return StageCalls(graph, Half(lowering.forward(forward, None), *_names(forward)),
                      Half(_when_called(lowering, backward), *_names(backward)))


def _names(gm: GraphModule) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    return (tuple(node.name for node in gm.graph.find_nodes(op="placeholder")),
            tuple(None if node is None else node.name for node in returned_nodes(gm)))


def _when_called(lowering: Lowering, backward: GraphModule) -> Any:
    compiled: list[Any] = []

    def call(arguments: list[Any]) -> Any:
        if not compiled:
            compiled.append(lowering.backward(backward, _as_they_lie(values_of(backward), arguments)))
        return compiled[0](arguments)

    return takes_list(call)


def _as_they_lie(fakes: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The fakes with the strides of the values."""
    return [fake if not isinstance(value, torch.Tensor) or fake.stride() == value.stride()
            else fake.as_strided(value.shape, value.stride()) for fake, value in zip(fakes, values, strict=True)]

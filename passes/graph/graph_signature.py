"""Inputs and outputs of a joint graph in the model's terms: parameters, buffers, data, gradients."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes import compat
from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.graph.layouts import StoredLayout
from passes.graph.placement_graph import InputKind
from passes.json_records import FrozenMap

LEAST_SHARDED_BYTES = 1 << 16
"""Outputs of a graph without a loss that are smaller than this are returned whole: gathering them costs next to nothing."""


@dataclass(frozen=True)
class GraphInput:
    """One input of the Dynamo graph.

    name: dotted name of a parameter or buffer, else an expression. placeable: a parameter that the runtime can
    shard. stored: its current layout, on the mesh in use, if it is placed already: a parameter, or an output of another graph.
    """

    name: str
    kind: InputKind
    trainable: bool = False
    placeable: bool = False
    stored: StoredLayout | None = None


@dataclass(frozen=True)
class ShardableOutput:
    """An output besides the loss: it may stay sharded until it is read. number: in `GraphSignature.outputs`. position:
    among the results of the Dynamo graph. tangent: placeholder of its gradient, if it can have one."""

    number: int
    position: int
    tangent: str | None


@dataclass(frozen=True, repr=False)
class GraphSignature:
    """Roles of the placeholders and outputs of one joint (or forward) graph, by node name."""

    kinds: FrozenMap[str, InputKind]
    """Placeholder -> kind; anything but a parameter that can be sharded counts as "buffer", "batch" or "constant"."""
    names: FrozenMap[str, str]
    """Placeholder of a parameter -> its dotted name."""
    trainable: FrozenMap[str, bool]
    stored: FrozenMap[str, StoredLayout]
    positions: FrozenMap[str, int]
    """Placeholder -> position among the inputs of the Dynamo graph."""
    outputs: tuple[tuple[str, str | None], ...]
    """Names of the output nodes, in order, each with the placeholder of the parameter, or of the input that arrives sharded,
    whose gradient it is."""
    forward_outputs: int
    training: bool
    unread: tuple[ShardableOutput, ...] = ()
    """Outputs that need not be read."""

    def __repr__(self) -> str:
        return f"Interface({len(self.kinds)} inputs, {len(self.outputs)} outputs)"


def input_position(node: Node, order: int = -1) -> int:
    """Position of a placeholder among the inputs of the Dynamo graph; `order` where tracing did not record it."""
    descriptor = node.meta.get("desc")
    return getattr(descriptor, "idx", order) if descriptor is not None else order


def signature_of(gm: GraphModule, inputs: Sequence[GraphInput], forward_outputs: int | None) -> GraphSignature:
    """Match the graph's placeholders with the inputs they stand for. `forward_outputs` is None for a forward graph."""
    kinds: dict[str, InputKind] = {}
    names: dict[str, str] = {}
    trainable: dict[str, bool] = {}
    stored: dict[str, StoredLayout] = {}
    positions: dict[str, int] = {}
    primals: list[Node] = []
    tokens = 0
    for order, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if node.name.startswith("tangents"):
            kinds[node.name] = "tangent"
            continue
        if compat.is_effect_token(node):  # AOTAutograd's own, before the inputs; no gradient is returned for it
            kinds[node.name] = "constant"
            tokens += 1
            continue
        primals.append(node)
        position = input_position(node, order - tokens)
        described = inputs[position]
        positions[node.name] = position
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        kind = described.kind
        if kind == "parameter" and not described.placeable and described.stored is None:
            kind = "buffer"
        kinds[node.name] = kind
        if kind == "parameter":
            names[node.name] = described.name
            trainable[node.name] = described.trainable
        if described.stored is not None:
            stored[node.name] = described.stored
    results = returned_nodes(gm)
    split = len(results) if forward_outputs is None else forward_outputs
    returned: list[tuple[str, str | None]] = []
    numbers: dict[int, int] = {}
    for k, node in enumerate(results):
        if node is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        numbers[k] = len(returned)
        owner = primals[k - split].name if split <= k < split + len(primals) else None
        returned.append((node.name, owner if owner in names or owner in stored else None))
    return GraphSignature(FrozenMap(kinds), FrozenMap(names), FrozenMap(trainable), FrozenMap(stored), FrozenMap(positions),
                          tuple(returned), split, forward_outputs is not None,
                          tuple(ShardableOutput(numbers[k], *found) for k, found in _unread(gm, results[:split]).items()))


def _unread(gm: GraphModule, results: Sequence[Node | None]) -> dict[int, tuple[int, str | None]]:
    """Forward outputs that may stay sharded. A step needs the loss alone, so if one output is the loss, a scalar, the others
    may never be read; without one, the next graph computes it from the large outputs. Outputs that alias an input or another
    output are excluded: a write to one must show in the other."""
    found = compat.results_of_program(gm, len(results))
    values = {k: value for k in found if (node := results[k]) is not None
              and isinstance(value := node.meta.get("val"), torch.Tensor)}
    has_loss = any(value.dim() == 0 and value.is_floating_point() for value in values.values())
    memory: Counter[int | None] = Counter(map(memory_of, (*gm.graph.find_nodes(op="placeholder"), *results)))
    return {k: found[k] for k, value in values.items()
            if value.dim() and value.layout == torch.strided and memory[memory_of(value)] == 1
            and (has_loss or value.numel() * value.itemsize >= LEAST_SHARDED_BYTES)}


def inputs_in_outputs(gm: GraphModule, forward_outputs: int | None) -> set[int]:
    """Positions of the inputs that the graph returns as forward outputs, unchanged or as a view."""
    returned = {memory_of(node) for node in returned_nodes(gm)[:forward_outputs]} - {None}
    return {input_position(node, order) for order, node in enumerate(gm.graph.find_nodes(op="placeholder"))
            if not node.name.startswith("tangents") and memory_of(node) in returned}


def graph_inputs(gm: GraphModule, values: Sequence[Any], placeable: Container[int] | None = None) -> list[GraphInput]:
    """Every input of a Dynamo graph, from its value and its Dynamo source. placeable: positions of the parameters that
    the runtime can shard; None: all."""
    found = []
    for position, (value, source) in enumerate(zip(values, compat.naming_sources(gm), strict=True)):
        kind = _kind(value, "" if source is None else compat.source_name(source))
        found.append(GraphInput(parameter_name(source), kind, bool(getattr(value, "requires_grad", False)),
                                kind == "parameter" if placeable is None else position in placeable))
    return found


def _kind(value: Any, source: str) -> InputKind:
    if isinstance(value, torch.nn.Parameter):
        return "parameter"
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return "constant"
    return "buffer" if "_buffers" in source else "batch"


def parameter_name(source: Any) -> str:
    """Dotted name of a parameter from its Dynamo source; for other inputs an expression."""
    if source is None:
        return "(made by Dynamo)"
    expression = compat.source_name(source)
    return ".".join(re.findall(r"\._(?:modules|parameters)\['([^']*)'\]", expression)) or expression

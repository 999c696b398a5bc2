"""Repeated blocks: which modules of a joint graph do the same work, forward and backward.

Unlike `blocks`, which only reads off where each node is from, this proves by a fingerprint which calls of modules are
equal and says which nodes correspond.

A candidate is one call of a module that is an entry of a list (`model.layers.3`). Its nodes are

- forward nodes with the module in their `nn_module_stack`;
- backward nodes that name it in `fwd_nn_module_stack`, or whose `seq_nr` is that of a forward node of the module;
- additions of gradients, which belong to no forward node: they go where that of their inputs does that ran first.

Two blocks are equal if their nodes correspond one to one, in graph order, with the same operators, constants and
wiring, inputs from outside of the same shapes and dtypes in the same places, and results used outside in the same
places; then all shapes inside are the same too. The fingerprint is a hash of exactly that.

Lists may be nested. Outer blocks count first; inside blocks without an equal, inner lists are looked at in turn.
"""
from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from passes.analysis.shapes import SHAPES
from passes.annotations import Key, read, write
from passes.base import AnalysisPass
from passes.registry import register
from passes.result import attribute_of, target_name


@dataclass(frozen=True)
class Block:
    """One call of a repeated module.

    path: the module in the model, with `@1` added for its second call. nodes: node names in graph order. inputs: nodes
    outside that its nodes read, in order of first use. outputs: those of its nodes that are used outside.
    The i-th entry of each corresponds to the i-th entry of every other block of the class.
    """

    path: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class BlockClass:
    """Blocks equal in structure, in order of execution."""

    fingerprint: str
    blocks: tuple[Block, ...]

    @property
    def multiplicity(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True)
class Repetition:
    """All classes with two or more blocks, in order of execution. No node is in two blocks."""

    classes: tuple[BlockClass, ...]

    def __str__(self) -> str:
        return ", ".join(f"{c.multiplicity} x {c.blocks[0].path}" for c in self.classes) or "none"


REPEATED_BLOCKS: Key[Repetition] = Key("repeated_blocks", Repetition, scope="graph")
"""The repeated blocks of a joint graph."""


@register
@dataclass(frozen=True)
class RepeatedBlocks(AnalysisPass):
    """Writes `REPEATED_BLOCKS`."""

    name = "repeated_blocks"
    requires = (SHAPES,)
    provides = (REPEATED_BLOCKS,)

    def run(self, graph_module: fx.GraphModule) -> None:
        order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
        rest = {node: path for node, path in candidates(graph_module.graph).items() if path}
        classes: list[tuple[int, BlockClass]] = []
        depth = 0
        while rest:
            blocks: dict[str, list[fx.Node]] = defaultdict(list)
            for node, path in rest.items():
                blocks[path[depth]].append(node)
            equal: dict[str, list[Block]] = defaultdict(list)
            for path, nodes in blocks.items():
                fingerprint, block = _describe(graph_module, path, nodes)
                equal[fingerprint].append(block)
            for fingerprint, found in equal.items():
                if len(found) > 1:
                    first = order[blocks[found[0].path][0]]
                    classes.append((first, BlockClass(fingerprint, tuple(found))))
            alone = {found[0].path for found in equal.values() if len(found) == 1}
            depth += 1
            rest = {n: path for n, path in rest.items() if path[depth - 1] in alone and len(path) > depth}
        write(REPEATED_BLOCKS, graph_module, Repetition(tuple(c for _, c in sorted(classes, key=lambda pair: pair[0]))))


def candidates(graph: fx.Graph) -> dict[fx.Node, tuple[str, ...]]:
    """Per call, in graph order: the list entries it belongs to, outermost first; empty for what is in no list."""
    forward: dict[float, tuple[str, ...]] = {}  # by seq_nr
    stacks: dict[fx.Node, tuple[str, ...]] = {}
    started: dict[fx.Node, float] = {}  # seq_nr of the forward operator that a node belongs to
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack, number = _list_entries(node), node.meta.get("seq_nr", math.inf)
        if node.meta.get("partitioner_tag") != "is_backward":
            forward.setdefault(number, stack)  # operators without a gradient repeat the number of the one before
        elif not stack and number in forward and not node.meta.get("is_gradient_acc", False):
            stack = forward[number]
        elif not stack:
            inputs = [source for source in node.all_input_nodes if source in started]
            first = min(inputs, key=started.__getitem__, default=None)
            stack, number = (stacks[first], started[first]) if first is not None else ((), math.inf)
        stacks[node], started[node] = stack, number
    return stacks


def _list_entries(node: fx.Node) -> tuple[str, ...]:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = []
    for key, (path, _) in stack.items():
        if re.search(r"\.\d+$|\[['\"]?\d+['\"]?\]$", path):
            _, at, call = key.rpartition("@")  # dynamo numbers the calls of a module after its first
            entries.append(_plain(path) + (at and at + call))
    return tuple(entries)


def _plain(source: str) -> str:
    """`L['self']._modules['layers'][3]`, as dynamo names modules, to `layers.3`."""
    parts = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", source).split(".")
    parts = [part for part in parts if part not in ("_modules", "_orig_mod")]
    if parts[0] in ("L", "G"):  # a local or global variable, which has no name of its own when the model is compiled
        del parts[: 2 if parts[1] in ("self", "fn") else 1]
    return ".".join(parts)


def _describe(graph_module: fx.GraphModule, path: str, nodes: list[fx.Node]) -> tuple[str, Block]:
    """The fingerprint of these nodes, and the block they make."""
    inside = {node: f"%{index}" for index, node in enumerate(nodes)}
    inputs: dict[fx.Node, str] = {}
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    used_outside = set(outputs)
    digest = hashlib.sha256()

    def reference(node: fx.Node) -> Any:
        if node in inside:
            return inside[node]
        if node not in inputs:
            inputs[node] = f"input {len(inputs)}: {_content(graph_module, node)}"
        return inputs[node]

    for node in nodes:
        arguments = fx.map_arg((node.args, node.kwargs), reference)
        line = f"{target_name(node.target)} {arguments} {node in used_outside}\n"
        digest.update(line.encode())
    return digest.hexdigest(), Block(path, _names(nodes), _names(inputs), _names(outputs))


def _content(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """What a block gets from outside: tensors by their specs, the subgraph of a higher-order operator by its code."""
    attribute = attribute_of(graph_module, node)
    if isinstance(attribute, fx.GraphModule):
        return attribute.code
    return str([(spec.shape, spec.dtype, spec.symbolic) for spec in read(SHAPES, node)])


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)

"""Pass: find the blocks of a traced model in order, with the values that cross between them."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from passes.analyses.shapes import SHAPES
from passes.annotations import Key, read, write
from passes.base import AnalysisPass
from passes.graph.fx_nodes import constants_of
from passes.graph.module_blocks import block_of, module_of, runs_in_backward
from passes.graph.planning_keys import GRAPH_SIGNATURE
from passes.op_rules.recomputable import uses_rng
from passes.pass_result import target_name
from passes.pipeline.block_chain import BlockChain, ForwardCall, chain_of_blocks
from passes.registry import register

BLOCK_CHAIN: Key[BlockChain] = Key("block_chain", BlockChain, scope="graph")
"""Repeated blocks, and the modules around them, with the values that forward passes between them."""


@register
@dataclass(frozen=True)
class FindBlocks(AnalysisPass):
    """Writes `BLOCK_CHAIN` for the forward part of a graph."""

    name = "find_blocks"
    requires = (SHAPES, GRAPH_SIGNATURE)
    provides = (BLOCK_CHAIN,)

    def run(self, graph_module: fx.GraphModule) -> None:
        write(BLOCK_CHAIN, graph_module, chain_of_blocks(list(_pieces(graph_module, learned_nodes(graph_module)))))


def learned_nodes(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Nodes that depend on parameters, random numbers, or a gradient; all others can be computed from the batch alone. An input
    that gets a gradient itself counts as a parameter."""
    kinds = read(GRAPH_SIGNATURE, graph_module).kinds
    learned: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        given = node.op == "placeholder" and (kinds.get(node.name) in ("parameter", "tangent")
                                              or getattr(node.meta.get("val"), "requires_grad", False))
        if given or uses_rng(node) or learned.intersection(node.all_input_nodes):
            learned.add(node)
    return learned


def _pieces(graph_module: fx.GraphModule, learned: set[fx.Node]) -> Iterator[ForwardCall]:
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or runs_in_backward(node):
            continue
        specs = [[(s.shape, s.dtype) for s in read(SHAPES, each)] for each in (node, *node.all_input_nodes)]
        yield ForwardCall(node.name, _path(node), tuple(each.name for each in node.all_input_nodes),
                          float(sum(spec.bytes for spec in read(SHAPES, node))),
                          str((target_name(node.target), constants_of(node), specs)), node not in learned)


def _path(node: fx.Node) -> str:
    """Path of the repeated block, else of the module, with its call number: Dynamo numbers calls after the first."""
    if block := block_of(node):
        return block
    _, at, call = next(reversed(node.meta.get("nn_module_stack") or {"": None})).rpartition("@")
    return module_of(node) + at + call * bool(at)

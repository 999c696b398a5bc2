"""Position of each call of a joint graph in its chain of blocks: see `passes.pipeline.find_stages`."""
from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from passes.graph.fx_nodes import WAIT
from passes.graph.module_blocks import is_backward, runs_in_backward
from passes.pipeline.block_chain import BlockChain

PARTS = (operator.getitem, WAIT)
"""Ops that share the position of their operand: they select a part of it, or wait for it."""


def places(gm: fx.GraphModule, chain: BlockChain, learned: set[fx.Node]) -> dict[fx.Node, int]:
    """Position of every call in the chain of blocks; see `passes.pipeline.find_stages`."""
    home = {piece: position for position, block in enumerate(chain.blocks) for piece in block.pieces}
    place: dict[fx.Node, int] = {}
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node in calls:
        if not runs_in_backward(node):
            source = node.args[0] if node.target in PARTS else None
            place[node] = place[source] if isinstance(source, fx.Node) and source in place else home[node.name]
    _to_first_readers(calls, learned, place)
    by_sequence: dict[int, int] = {}
    for node, position in place.items():
        number = node.meta.get("seq_nr")
        if number is not None and node in learned:
            by_sequence[number] = max(position, by_sequence.get(number, 0))
    for node in calls:
        if runs_in_backward(node):
            place[node] = _of_backward(node, place, learned, by_sequence, len(chain.blocks) - 1)
    _to_last_readers([node for node in calls if runs_in_backward(node) and not is_backward(node)], learned, place)
    return place


def _to_first_readers(calls: Sequence[fx.Node], learned: set[fx.Node], place: dict[fx.Node, int]) -> None:
    """Move calls on parameters alone to their first reader, whichever module contains them."""
    alone: set[fx.Node] = set()
    for node in calls:
        inputs = [x for x in node.all_input_nodes if x in learned]
        given = all(x in learned or x.op == "get_attr" for x in node.all_input_nodes)
        if node in place and inputs and given and all(x.op == "placeholder" or x in alone for x in inputs):
            alone.add(node)
    for node in reversed(calls):
        readers = [place[user] for user in node.users if user in place]
        if node in alone and readers:
            place[node] = min(readers)
    for node in calls:
        if node.target in PARTS and node in alone:
            place[node] = place[node.all_input_nodes[0]]


def _to_last_readers(held_back: Sequence[fx.Node], learned: set[fx.Node], place: dict[fx.Node, int]) -> None:
    """Move held-back calls to their latest reader or operand: results go to earlier stages from there."""
    for node in reversed(held_back):
        place[node] = max((place[user] for user in node.users if user in place), default=place[node])
    for node in held_back:
        place[node] = max([place[node], *(place[x] for x in node.all_input_nodes if x in place and x in learned)])


def _of_backward(node: fx.Node, place: dict[fx.Node, int], learned: set[fx.Node], by_sequence: dict[int, int],
                 last: int) -> int:
    # A sum of gradients carries the `seq_nr` of whatever ran last in forward.
    number = None if node.meta.get("is_gradient_acc") else node.meta.get("seq_nr")
    if node.target in PARTS:
        return place[node.all_input_nodes[0]]
    made = [place[x] for x in node.all_input_nodes if x in place and x in learned and is_backward(x)]
    own = by_sequence.get(number) if number is not None else None
    if own is None:
        own = min(made) if made else max(
            (place[x] for x in node.all_input_nodes if x in place and x in learned), default=last)
    return min([own, *made])

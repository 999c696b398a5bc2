"""Choose the number of chunks of a loss by bytes: what chunks free, what they keep for backward, and what else a step holds.

Chunks keep the gradient of the head from forward to backward, and read the head's weight and add to its gradient once each. So
they are taken only where the logits are most of what a step holds and a chunk has rows enough to hide that traffic.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.transforms.loss_chunks.loss_region import LossRegion, Unchunkable, matrices_of

LEAST_FREED_BYTES = 16 << 20
"""Chunks free at least so much."""
LEAST_SHARE = 0.15
"""Chunks free at least this share of what a step holds."""
LEAST_CHUNKS, MOST_CHUNKS = 8, 32
LARGE_CHUNK_BYTES = 256 << 20
"""More chunks than the fewest are taken where a chunk's logits are larger than this and than the head's weight: they take
longer to compile."""
ROWS_IN_CACHE, ROWS_ON_CPU, ROWS = 64, 256, 1024
"""Rows of a chunk that hide the traffic of the head's weight and gradient: where these stay in the cache of a CPU, elsewhere on
a CPU, and on other devices."""
CACHE_BYTES = 16 << 20


def chosen_chunks(gm: GraphModule, region: LossRegion, forward_outputs: int) -> int:
    """The number of chunks in which the loss of a joint graph is computed. Raises Unchunkable where one is best."""
    logits = sum(_bytes(node) for node in region.heads)
    weights = sum(_bytes(matrices_of(node)[1]) for node in region.heads)
    rows = max(node.meta["val"].numel() // node.meta["val"].shape[-1] for node in region.heads)
    on_cpu = region.heads[0].meta["val"].device.type == "cpu"
    least_rows = (ROWS_IN_CACHE if weights <= CACHE_BYTES else ROWS_ON_CPU) if on_cpu else ROWS
    chunks = LEAST_CHUNKS
    while chunks < MOST_CHUNKS and logits // chunks > max(LARGE_CHUNK_BYTES, weights) and rows // (2 * chunks) >= least_rows:
        chunks *= 2
    freed = 2 * (logits - logits // chunks) - 2 * weights  # logits and their gradient
    held = 2 * logits + _held_bytes(gm, region, forward_outputs)
    if rows // chunks < least_rows or freed < LEAST_FREED_BYTES or freed < LEAST_SHARE * held:
        raise Unchunkable(f"chunks would free {freed} of {held} bytes, with {rows // chunks} rows each")
    return chunks


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _calls_before(node: Node) -> set[Node]:
    found, stack = {node}, [node]
    while stack:
        for x in stack.pop().all_input_nodes:
            if x.op == "call_function" and x not in found:
                found.add(x)
                stack.append(x)
    return found


def _held_bytes(gm: GraphModule, region: LossRegion, forward_outputs: int) -> int:
    """Bytes of what forward computes before the heads, an upper bound of what it saves for backward."""
    inputs = {memory_of(node) for node in gm.graph.find_nodes(op="placeholder")}
    before: set[Node] = set().union(*(_calls_before(x) for x in (*region.heads, *_losses(gm, forward_outputs))))
    sizes = {memory: _bytes(node) for node in before.difference(region.calls)
             if (memory := memory_of(node)) is not None and memory not in inputs}
    return sum(sizes.values())


def _losses(gm: GraphModule, forward_outputs: int) -> Iterable[Node]:
    return (node for node in returned_nodes(gm)[:forward_outputs] if node is not None)

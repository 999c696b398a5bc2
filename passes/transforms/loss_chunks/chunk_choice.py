"""Choose the number of chunks of a loss: the bytes that they free against the traffic of the head's weight and its gradient.

A chunk reads the weight twice more and adds to the gradient once more. On a CPU and with 98 MiB of weight, the loss of 1,024
rows in 2, 4, 8, 16 and 32 chunks takes 1.00, 1.01, 1.04, 1.14 and 1.39 of the processor's time at once: products of few rows no
longer hide that traffic. So a chunk has a least number of rows. Without a budget, chunks are taken where they cost next to no
time and logits are much of what a step holds; under one wherever they free bytes, by the loss alone, so that a plan of fewer
layers has a run's chunks.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.analyses.inductor_fusion import is_inlined
from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.transforms.loss_chunks.loss_region import LossRegion, Unchunkable, matrices_of

LEAST_FREED_BYTES, LEAST_FREED_ON_GPU = 16 << 20, 1 << 30
"""Chunks free at least so much; the second on a GPU without a budget, where memory is less scarce and small chunks take longer
to launch than to compute: a step of 17.0 ms with 256 MiB of logits took 18.3 ms in 4 chunks on an H200."""
LEAST_SHARE = 0.15
"""Chunks free at least this share of what a step holds."""
LEAST_CHUNKS, USUAL_CHUNKS, MOST_CHUNKS = 2, 8, 32
LARGE_CHUNK_BYTES, LARGE_UNDER_BUDGET = 256 << 20, 8 << 20
"""More chunks than usual, which take longer to compile, are taken where a chunk's logits are larger than this and than the
head's weight, which stays in memory anyway."""
ROWS_IN_CACHE, ROWS_ON_CPU, ROWS = 64, 128, 1024
"""Rows of a chunk under a budget, which hide most of the traffic of the head's weight and gradient: where these stay in the
cache of a CPU, elsewhere on a CPU, and on other devices."""
ROWS_WITHOUT_BUDGET = 256
"""As above, on a CPU and without a budget. On two ranks, BERT and T5 with 8,192 words and 512 rows a rank took 0.96 to 0.99 and
0.99 to 1.03 of the processor's time in 2 chunks, 1.04 to 1.10 and 1.05 to 1.06 in 8. Where chunks wait for other ranks, as with
a vocabulary split over them, steps took 0.98, 1.05, 1.04 and 1.18 of DDP's with 1,024 rows in 1, 2, 4 and 8 chunks."""
CACHE_BYTES = 16 << 20


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of the products that make logits. logits, weights: bytes. rows: of the logits."""

    logits: int
    weights: int
    rows: int
    on_cpu: bool


def chosen_chunks(gm: GraphModule, region: LossRegion, forward_outputs: int, budgeted: bool) -> int:
    """The number of chunks in which the loss of a joint graph is computed. Raises Unchunkable where one is best."""
    values = [node.meta["val"] for node in region.heads]
    sizes = HeadSizes(sum(map(_bytes, region.heads)), sum(_bytes(matrices_of(node)[1]) for node in region.heads),
                      max(x.numel() // x.shape[-1] for x in values), values[0].device.type == "cpu")
    return number_of_chunks(sizes, budgeted, lambda: _held_bytes(gm, region, forward_outputs))


def number_of_chunks(sizes: HeadSizes, budgeted: bool, held_bytes: Callable[[], int]) -> int:
    """The number of chunks for logits of these sizes. held_bytes: of what forward saves besides. Raises Unchunkable where one
    is best."""
    logits, weights, rows, on_cpu = sizes.logits, sizes.weights, sizes.rows, sizes.on_cpu
    under_budget = ROWS_IN_CACHE if weights <= CACHE_BYTES else ROWS_ON_CPU
    least_rows = ROWS if not on_cpu else under_budget if budgeted else ROWS_WITHOUT_BUDGET
    large = max(LARGE_UNDER_BUDGET if budgeted else LARGE_CHUNK_BYTES, weights)
    chunks = USUAL_CHUNKS
    while chunks > LEAST_CHUNKS and rows // chunks < least_rows:
        chunks //= 2
    while chunks < MOST_CHUNKS and logits // chunks > large and rows // (2 * chunks) >= least_rows:
        chunks *= 2
    freed = 2 * (logits - logits // chunks) - weights  # logits and their gradient
    if rows // chunks < least_rows:
        raise Unchunkable(f"{rows} rows are too few: {least_rows} rows of a chunk hide the traffic of the head's weight")
    if freed < (LEAST_FREED_BYTES if on_cpu or budgeted else LEAST_FREED_ON_GPU):
        raise Unchunkable(f"{chunks} chunks would free {max(freed, 0)} bytes")
    if not budgeted and freed < LEAST_SHARE * (held := 2 * logits + held_bytes()):
        raise Unchunkable(f"{chunks} chunks would free {freed} of {held} bytes")
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
    """Bytes of what forward computes before the heads and saves for backward: not what is fused into its readers, which
    backward computes again."""
    inputs = {memory_of(node) for node in gm.graph.find_nodes(op="placeholder")}
    before: set[Node] = set().union(*(_calls_before(x) for x in (*region.heads, *_losses(gm, forward_outputs))))
    sizes = {memory: _bytes(node) for node in before.difference(region.calls) if not is_inlined(node.target)
             and (memory := memory_of(node)) is not None and memory not in inputs}
    return sum(sizes.values())


def _losses(gm: GraphModule, forward_outputs: int) -> Iterable[Node]:
    return (node for node in returned_nodes(gm)[:forward_outputs] if node is not None)

"""Compute the loss in chunks of rows: head, loss and their gradients for one chunk after another, all in forward.

    logits = hidden @ weight           for rows of each chunk:
    loss = f(logits, labels)     ->        logits, their part of the loss, and the gradients for a tangent of 1
    d_hidden, d_weight                 add up or concatenate; in backward, multiply the gradients by the tangent

What is as large as the logits then exists for one chunk at a time, and backward keeps the gradients of the hidden state and of
the head instead. The loop is unrolled into the joint graph, so that passes, budgets and compilers after this one see a graph
like any other.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.fx import GraphModule

from passes.base import TransformPass
from passes.compat import fake_mode_of, without_modes
from passes.errors import BadInput
from passes.graph.decision import LossChunking
from passes.graph.graph_copy import copy_graph
from passes.registry import register
from passes.transforms.cleanup.normalization import REWRITES
from passes.transforms.loss_chunks.chunk_choice import chosen_chunks
from passes.transforms.loss_chunks.chunk_notes import note
from passes.transforms.loss_chunks.loss_region import LossRegion, Unchunkable, find_region, scalar_tangents
from passes.transforms.loss_chunks.row_placement import TooFewRows, place_rows
from passes.transforms.loss_chunks.sliced_rows import slice_before_heads
from passes.transforms.loss_chunks.unrolled_loop import LoopUnroller
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.rewriting.fake_results import FakeResults

aten = torch.ops.aten
log = logging.getLogger("hpml")
SUMS = (aten.mean.default, aten.mean.dim, aten.var.correction, aten.var_mean.correction)
"""Operators that are rewritten into sums, which may be partial."""
Chunks = int | Literal["auto", "budget"]
"""A number of chunks; "auto" and "budget" choose one, as without and under a memory budget."""
WHERE = "options['loss_chunks']"


@register
@dataclass(frozen=True)
class ChunkLoss(TransformPass):
    """Computes the loss of a joint graph in chunks. chunks: their number; 1 leaves the graph unchanged. of_stage: the graph is
    a pipeline stage, of which only the last has the loss."""

    name = "chunk_loss"

    forward_outputs: int = 0
    chunks: Chunks = 1
    of_stage: bool = False

    def run(self, graph_module: GraphModule) -> bool:
        if self.of_stage and not scalar_tangents(graph_module):
            return False
        return chunk_loss(graph_module, self.forward_outputs, self.chunks) is not None


def chunk_loss(gm: GraphModule, forward_outputs: int, chunks: Chunks) -> int | None:
    """Compute the loss of a joint graph in chunks, in place. Returns their number; None, and an unchanged graph, with a message
    that says why, where that is not possible. Raises BadInput for more chunks than rows."""
    if chunks == 1:
        return None
    try:
        made, head = _in_chunks(gm, forward_outputs, chunks)
    except Unchunkable as error:
        is_new = note(LossChunking(reason=str(error)))
        if isinstance(chunks, str):
            log.debug("the loss is not computed in chunks: %s", error)
        elif isinstance(error, TooFewRows):
            raise BadInput(f"the loss cannot be computed in {chunks} chunks: {error}", WHERE,
                           f"give at most {error.most}") from None
        elif is_new:
            log.warning("the loss is not computed in chunks: %s", error)
        return None
    with contextlib.suppress(Unchunkable):
        while True:  # other heads, whose gradients meet those of the first behind the loop
            _in_chunks(gm, forward_outputs, made)
    note(LossChunking(made, head))
    log.info("the loss is computed in %d chunks of rows, from %s on", made, head)
    return made


def _in_chunks(gm: GraphModule, forward_outputs: int, chunks: Chunks) -> tuple[int, str]:
    """Rewrite the region of the largest head. Returns the number of chunks, and the head's name. Raises Unchunkable."""
    work = copy_graph(gm)
    with without_modes():
        region = _with_sums(work, find_region(work, forward_outputs), forward_outputs)
        while slice_before_heads(work, region):
            region = find_region(work, forward_outputs)
        count = chosen_chunks(work, region, forward_outputs, chunks == "budget") if isinstance(chunks, str) else chunks
        LoopUnroller(work, place_rows(work, region, count), count).run()
    work.graph.lint()
    gm.graph = work.graph
    return count, region.heads[0].name


@functools.cache
def source_hash() -> str:
    """Hash of the modules of this folder, for keys of caches over graphs that they changed."""
    return hashlib.sha256(b"".join(each.read_bytes() for each in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()[:16]


def _with_sums(gm: GraphModule, region: LossRegion, forward_outputs: int) -> LossRegion:
    """The region after its means are rewritten into sums."""
    fakes, changed = FakeResults(fake_mode_of(gm)), False
    for node in region.calls:
        if node.target in SUMS and REWRITES[node.target](node, CallInserter(gm.graph, node, fakes=fakes)):
            gm.graph.erase_node(node)
            changed = True
    return find_region(gm, forward_outputs) if changed else region

"""Passes over a joint graph as it was traced: those that the options name, and the loss in chunks."""
from __future__ import annotations

from torch.fx import GraphModule

from hpml_compiler.options import Options
from passes.tracing.named_passes import run_named_passes
from passes.transforms.loss_chunks.chunk_loss import chunk_loss


def change_traced(joint: GraphModule, forward_outputs: int, options: Options, alone: bool) -> None:
    """alone: on one device. On several, the loss is computed in chunks of each rank's rows, after placement; with microbatches,
    in their loop."""
    run_named_passes(options.passes, joint)
    if alone and options.microbatches == 1:
        chunk_loss(joint, forward_outputs, options.chunks)

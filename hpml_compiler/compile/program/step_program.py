"""Program of one rank for one step, as data: a prologue and an epilogue around a loop over microbatches, whose body is one
stage, or the stages of a pipeline that this rank runs. The graph cache stores it.

It has graphs that are ready to be compiled, names, and fakes. The graph that it was cut out of is not needed any more.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpml_compiler.compile.program.lowered_stages import StageProgram
from hpml_compiler.runtime.program.fused_forward_backward import RerunState
from passes.graph.loops.loop_parts import LoopInput, PrologueEpilogue


@dataclass(frozen=True)
class StepInterface:
    """Inputs and results of a graph and of its microbatch loop. inputs, results: fakes of the inputs, by name, and of the
    results, of which the first `forward_outputs` are forward's. loss: name of the loss's tangent, if the loss is inside; rerun:
    state for rerunning the step, in that case. saved: fakes of the values that forward saves for backward."""

    microbatches: int
    forward_outputs: int
    inputs: Mapping[str, Any]
    results: tuple[Any, ...]
    loop: PrologueEpilogue
    loss: str | None
    rerun: RerunState | None
    saved: tuple[Any, ...]


@dataclass(frozen=True)
class PipelineLinks:
    """Connections of a rank's stages with other ranks. reads, outputs, gradients: see `StagedBody`. alone, elsewhere, lent,
    stays: see `runtime.program.pipeline_step.PipelineLoop`."""

    reads: Mapping[str, LoopInput]
    outputs: Mapping[int, int]
    gradients: Mapping[int, tuple[int, ...]]
    alone: frozenset[int]
    elsewhere: Mapping[str, torch.Tensor]
    lent: Mapping[str, tuple[int, torch.Tensor]]
    stays: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepProgram:
    """parts: inputs and results, and the graphs around the loop. stages: the loop's body. links: None without a pipeline, whose
    body is one stage. counted: whether a memory budget decided about the body, so that compiled code may use no more memory
    than was counted."""

    parts: StepInterface
    stages: tuple[StageProgram, ...]
    links: PipelineLinks | None = None
    counted: bool = False

    def __str__(self) -> str:
        halves = (each.halves for each in self.stages)
        body = ", ".join(f"stage {each.ends.index}: " + " + ".join(
            f"{len(half.gm.graph.nodes)} nodes" for half in (own.forward, own.backward, own.weight) if half is not None)
            for each, own in zip(self.stages, halves))
        around = {f"{when} {half}": segment.gm for when in ("before", "after")
                  for half, segment in zip(("forward", "backward"), getattr(self.parts.loop, when))}
        return f"{self.parts.microbatches} x ({body}); " + ", ".join(
            f"{name}: {len(gm.graph.nodes)} nodes" for name, gm in around.items() if gm is not None)

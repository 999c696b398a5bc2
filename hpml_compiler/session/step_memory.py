"""Memory that a graph being compiled shares with the other graphs of its step, found from the live parameters and optimizers
and from the graphs compiled before (input of `hpml_compiler.planner.graph.memory_budget`)."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from hpml_compiler.optimizer_transient import transient_of
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext, replicated_memory
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.session import optimizer_lookup
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.transforms.outputs.split_outputs import copied_bytes


@dataclass
class StepGraphs:
    """Graphs of a step under a memory budget. graphs: memory of each by frame, in the order of first compilation. met: the
    frame in which each parameter was first seen. stands_for: the frame of a graph with the loss -> that of the graph that it
    replaces."""

    graphs: dict[str, GraphMemory] = field(default_factory=dict)
    met: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    stands_for: dict[str, str] = field(default_factory=dict)

    def enter(self, sharing: StepContext, mine: GraphMemory, kept: CheckpointDecision) -> GraphMemory:
        """Record the memory and saved activations of a graph for the graphs compiled after it; returns the record."""
        self.graphs[sharing.frame] = entered = replace(mine, saved=kept.saved_bytes)
        return entered


def step_context(step: StepGraphs, gm: GraphModule, inputs: Iterable[object], options: Options,
                 memory_bytes: int) -> StepContext:
    """The `StepContext` of a graph, with the optimizer of its parameters or, before it exists, the one in the options."""
    frame = compat.frame_being_compiled()
    name = compat.function_being_compiled() if frame else "the graph"
    frame = step.stands_for.get(frame, frame)
    parameters = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
    own = [each for each in parameters if step.met.setdefault(each, frame) == frame]
    found = optimizer_lookup.optimizer_of(parameters) or optimizer_lookup.optimizer_of(list(step.met))
    known = optimizer_lookup.optimizer_name(found[0]) if found and options.optimizer == "auto" else None
    budget = options.budget_bytes(memory_bytes) or memory_bytes
    options = options.model_copy(update={"optimizer": known or options.optimizer, "memory_budget": budget})
    unseen = (p for p in optimizer_lookup.held_by(found) if not isinstance(p, DTensor) and p not in step.met)
    frozen = (float(p.numel() * p.element_size()) for p in own if not p.requires_grad)
    return StepContext(
        replicated_memory(name, _trained_bytes(own), frozen, options), options,
        transient_of(options, device_type(), found[0].param_groups if found else ({},)),
        frame, step.graphs, sum(_trained_bytes(unseen)), compat.ends_in_a_break(gm), copied_bytes(gm))


def _trained_bytes(parameters: Iterable[torch.Tensor]) -> list[float]:
    with compat.plain_torch_functions():  # reads a placed parameter without gathering it
        return [float(p.numel() * p.element_size()) for p in parameters if p.requires_grad]

"""What a graph that is being compiled shares with the others of its step: found from the parameters and the optimizer that
are there, and from what was compiled before (`hpml_compiler.planner.graph.memory_budget` says what follows)."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext, replicated_memory
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.session import optimizer_lookup
from hpml_compiler.simulate.optimizer_transient import transient_of
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision


@dataclass
class StepGraphs:
    """What is known of a step: its graphs, in the order in which they were compiled first, by piece of the script; and the
    piece that each of their parameters was met in first."""

    graphs: dict[str, GraphMemory] = field(default_factory=dict)
    met: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def enter(self, sharing: StepContext, mine: GraphMemory, kept: CheckpointDecision) -> GraphMemory:
        """What a graph holds and keeps, which is returned, counts for those that are compiled after it."""
        self.graphs[sharing.frame] = entered = replace(mine, saved=kept.saved_bytes)
        return entered


def step_context(step: StepGraphs, gm: GraphModule, inputs: Iterable[object], options: Options,
                 memory_bytes: int) -> StepContext:
    """For an optimizer that is there already or will be."""
    frame = compat.frame_being_compiled()
    name = compat.function_being_compiled() if frame else "the graph"
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
        frame, step.graphs, sum(_trained_bytes(unseen)), compat.ends_in_a_break(gm))


def _trained_bytes(parameters: Iterable[torch.Tensor]) -> list[float]:
    with compat.plain_torch_functions():  # of a placed one, which looks whole, without making it so
        return [float(p.numel() * p.element_size()) for p in parameters if p.requires_grad]

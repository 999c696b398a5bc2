"""What a graph that is being compiled shares with the others of its step: found from the parameters and the optimizer that
are there, and from what was compiled before (`hpml_compiler.planning.room` says what follows)."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from hpml_compiler.compile import optimizers
from hpml_compiler.options import Options
from hpml_compiler.planning.making import making
from hpml_compiler.planning.room import Held, Sharing, held_whole
from hpml_compiler.runtime.devices import device_type
from passes import compat
from passes.keeping.keys import KeptNodes


@dataclass
class Step:
    """What is known of a step: its graphs, in the order in which they were compiled first, by piece of the script; and the
    piece that each of their parameters was met in first."""

    graphs: dict[str, Held] = field(default_factory=dict)
    met: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def enter(self, sharing: Sharing, mine: Held, kept: KeptNodes) -> Held:
        """What a graph holds and keeps, which is returned, counts for those that are compiled after it."""
        self.graphs[sharing.frame] = entered = replace(mine, saved=kept.saved_bytes)
        return entered


def sharing_of(step: Step, gm: GraphModule, inputs: Iterable[object], options: Options, memory_bytes: int) -> Sharing:
    """For an optimizer that is there already or will be."""
    frame = compat.frame_being_compiled()
    name = compat.function_being_compiled() if frame else "the graph"
    parameters = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
    own = [each for each in parameters if step.met.setdefault(each, frame) == frame]
    found = optimizers.holding(parameters) or optimizers.holding(list(step.met))
    known = optimizers.name_of(found[0]) if found and options.optimizer == "auto" else None
    budget = options.budget_bytes(memory_bytes) or memory_bytes
    options = options.model_copy(update={"optimizer": known or options.optimizer, "memory_budget": budget})
    unseen = (p for p in optimizers.held_by(found) if not isinstance(p, DTensor) and p not in step.met)
    frozen = (float(p.numel() * p.element_size()) for p in own if not p.requires_grad)
    return Sharing(
        held_whole(name, _trained_bytes(own), frozen, options), options,
        making(options, device_type(), found[0].param_groups if found else ({},)),
        frame, step.graphs, sum(_trained_bytes(unseen)), compat.ends_in_a_break(gm))


def _trained_bytes(parameters: Iterable[torch.Tensor]) -> list[float]:
    with compat.plain_torch_functions():  # of a placed one, which looks whole, without making it so
        return [float(p.numel() * p.element_size()) for p in parameters if p.requires_grad]

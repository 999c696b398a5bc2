"""What the graphs of one step leave to one of them of the bytes that they share.

All of them hold their parameters, gradients and optimizer state. While one runs, those before it hold what they keep for
backward, and in its backward the gradients of those after it are there. How much it may keep itself depends on graphs that
nobody has seen yet: they are taken to need what this one does, in proportion to their parameters, which are those that the
optimizer holds and no graph had so far.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from hpml_compiler.compile import optimizers
from hpml_compiler.compile.optimizers import Making
from hpml_compiler.options import Options
from hpml_compiler.runtime.devices import device_type
from passes import compat
from passes.keeping.keys import KeptNodes

UNKNOWN_REST = 0.5
"""What of the room is left to graphs after one that ends where the script breaks it, if nothing is known of them."""


@dataclass(frozen=True)
class Held:
    """Bytes that one graph holds on a rank. gradients: of its parameters that are trained. largest: of these, the largest.
    saved: between its forward and its backward."""

    name: str
    parameters: float
    gradients: float
    optimizer: float
    largest: float = 0.0
    saved: float = 0.0


@dataclass
class Step:
    """What is known of a step: its graphs, in the order in which they were compiled first, by piece of the script; and the
    piece that each of their parameters was met in first."""

    graphs: dict[str, Held] = field(default_factory=dict)
    met: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)


@dataclass(frozen=True)
class Room:
    """Of one graph. left: bytes that it may hold at most besides what is there anyway. between, after: of these, what it leaves
    to graphs after it when its forward is over, and to the optimizer when its backward is. state: parameters and optimizer
    state, of all graphs; later: gradients of those after it. made: what the optimizer makes during its step, and how it would
    be less. others: what graphs before it keep, by name."""

    budget: int
    left: float
    between: float
    after: float
    state: float
    later: float
    made: float
    remedy: str
    others: Mapping[str, float]


def _trained_bytes(parameters: Iterable[torch.Tensor]) -> list[float]:
    with compat.plain_torch_functions():  # of a placed one, which looks whole, without making it so
        return [float(p.numel() * p.element_size()) for p in parameters if p.requires_grad]


class Sharing:
    """What a graph that is being compiled, for an optimizer that is there already or will be, shares with the others of its
    step. options: with the optimizer that was found, and the budget in bytes. making: what that makes during its step."""

    def __init__(self, step: Step, gm: GraphModule, inputs: Iterable[object], options: Options, memory_bytes: int):
        self.step, self.breaks = step, compat.ends_in_a_break(gm)
        self.frame = compat.frame_being_compiled()
        self.name = compat.function_being_compiled() if self.frame else "the graph"
        parameters = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
        self.own = [each for each in parameters if step.met.setdefault(each, self.frame) == self.frame]
        found = optimizers.holding(parameters) or optimizers.holding(list(step.met))
        name = optimizers.name_of(found[0]) if found and options.optimizer == "auto" else None
        self.budget = options.budget_bytes(memory_bytes) or memory_bytes
        self.options = options.model_copy(update={"optimizer": name or options.optimizer, "memory_budget": self.budget})
        self.making = optimizers.making(self.options.optimizer_name, device_type(), found[0] if found else None)
        if options.offloads("optimizer"):  # a part at a time, of the size of the largest, with its state
            most = max(self.making.at_once, self.making.one_by_one)
            self.making = Making(0, most + self.options.optimizer_states, self.making.remedy)
        unseen = (p for p in optimizers.held_by(found) if not isinstance(p, DTensor) and p not in step.met)
        self.unseen = sum(_trained_bytes(unseen))  # whole, of what the optimizers train and no graph had so far

    @property
    def held_by_others(self) -> float:
        """Bytes of what graphs before it hold through the step and keep for backward."""
        others = (each for frame, each in self.step.graphs.items() if frame != self.frame)
        return sum(each.parameters + each.optimizer + each.saved for each in others)

    def held(self) -> Held:
        """Whole, by the parameters that belong to no other graph."""
        sizes = _trained_bytes(self.own)
        frozen = sum(p.numel() * p.element_size() for p in self.own if not p.requires_grad)
        return Held(self.name, frozen + sum(sizes), sum(sizes), self.options.resident_states * sum(sizes),
                    max(sizes, default=0.0))

    def room(self, mine: Held) -> Room:
        """mine: of this graph on a rank. What graphs after it will have there of their parameters is taken to be in
        proportion."""
        whole = self.held().gradients
        rest = self.unseen * (mine.gradients / whole if whole else 1.0)
        graphs = {**self.step.graphs, self.frame: mine}
        place = list(graphs).index(self.frame)
        state = sum(each.parameters + each.optimizer for each in graphs.values()) + (1 + self.options.resident_states) * rest
        later = sum(each.gradients for each in list(graphs.values())[place + 1:]) + rest
        others: dict[str, float] = defaultdict(float)
        for frame, each in self.step.graphs.items():
            if frame != self.frame and each.saved:
                others[each.name] += each.saved
        left = self.budget - state - later - sum(others.values())
        left_to_rest = rest / (mine.gradients + rest) if rest and mine.gradients else UNKNOWN_REST * (rest > 0 or self.breaks)
        gradients = sum(each.gradients for each in graphs.values()) + rest
        made = self.making.bytes_of(gradients, max(each.largest for each in graphs.values()))
        after = state + gradients + made - mine.gradients - (self.budget - left)
        return Room(self.budget, left, max(left, 0.0) * left_to_rest, after, state, later, made, self.making.remedy,
                    dict(others))

    def enter(self, mine: Held, kept: KeptNodes) -> None:
        """What this graph holds and keeps counts for those that are compiled after it."""
        self.step.graphs[self.frame] = replace(mine, saved=kept.saved_bytes)

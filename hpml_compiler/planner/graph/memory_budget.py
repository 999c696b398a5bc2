"""What the graphs of one step leave to one of them of the bytes that they share.

All of them hold their parameters, gradients and optimizer state. While one runs, those before it hold what they keep for
backward, and in its backward the gradients of those after it are there. How much it may keep itself depends on graphs that
nobody has seen yet: they are taken to need what this one does, in proportion to their parameters, which are those that the
optimizer holds and no graph had so far.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpml_compiler.options import Options
from hpml_compiler.simulate.optimizer_transient import OptimizerTransient

UNKNOWN_REST = 0.5
"""What of the room is left to graphs after one that ends where the script breaks it, if nothing is known of them."""


@dataclass(frozen=True)
class GraphMemory:
    """Bytes that one graph holds on a rank. gradients: of its parameters that are trained. largest: of these, the largest.
    saved: between its forward and its backward."""

    name: str
    parameters: float
    gradients: float
    optimizer: float
    largest: float = 0.0
    saved: float = 0.0


def replicated_memory(name: str, trained: Iterable[float], frozen: Iterable[float], options: Options) -> GraphMemory:
    """By a graph with parameters of these bytes on a device that has all of it."""
    sizes = list(trained)
    return GraphMemory(name, sum(frozen) + sum(sizes), sum(sizes), options.resident_states * sum(sizes),
                       max(sizes, default=0.0))


@dataclass(frozen=True)
class BudgetShare:
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


@dataclass(frozen=True)
class StepContext:
    """What a graph shares with the others of its step. frame: the piece of the script that it is of; whole: what it holds by
    its parameters, on a device that has all of it; graphs: those before it and, where it is compiled once more, it and those
    after it, by frame, in their order. unseen: bytes, whole, of what the optimizer trains and no graph had so far; breaks:
    whether more graphs follow in any case. options: with the optimizer that is there, and the budget in bytes. making: what
    that makes during its step."""

    whole: GraphMemory
    options: Options
    making: OptimizerTransient
    frame: str = ""
    graphs: Mapping[str, GraphMemory] = field(default_factory=dict)
    unseen: float = 0.0
    breaks: bool = False

    @property
    def budget(self) -> int:
        assert isinstance(self.options.memory_budget, int), "in bytes"
        return self.options.memory_budget

    @property
    def held_by_others(self) -> float:
        """Bytes of what graphs before it hold through the step and keep for backward."""
        others = (each for frame, each in self.graphs.items() if frame != self.frame)
        return sum(each.parameters + each.optimizer + each.saved for each in others)

    @property
    def told(self) -> tuple[object, ...]:
        """What all of this follows from, in words that are the same in another process, which counts frames otherwise."""
        place = [*self.graphs].index(self.frame) if self.frame in self.graphs else len(self.graphs)
        return self.whole, self.making, tuple(self.graphs.values()), place, self.unseen, self.breaks

    def room(self, mine: GraphMemory) -> BudgetShare:
        """mine: of this graph on a rank. What graphs after it will have there of their parameters is taken to be in
        proportion."""
        states, whole = self.options.resident_states, self.whole.gradients
        rest = self.unseen * (mine.gradients / whole if whole else 1.0)
        graphs = {**self.graphs, self.frame: mine}
        place = list(graphs).index(self.frame)
        state = sum(each.parameters + each.optimizer for each in graphs.values()) + (1 + states) * rest
        later = sum(each.gradients for each in list(graphs.values())[place + 1:]) + rest
        others: dict[str, float] = defaultdict(float)
        for frame, each in self.graphs.items():
            if frame != self.frame and each.saved:
                others[each.name] += each.saved
        left = self.budget - state - later - sum(others.values())
        left_to_rest = rest / (mine.gradients + rest) if rest and mine.gradients else UNKNOWN_REST * (rest > 0 or self.breaks)
        gradients = sum(each.gradients for each in graphs.values()) + rest
        made = self.making.bytes_of(gradients, max(each.largest for each in graphs.values()))
        after = state + gradients + made - mine.gradients - (self.budget - left)
        return BudgetShare(self.budget, left, max(left, 0.0) * left_to_rest, after, state, later, made, self.making.remedy,
                           dict(others))

"""Share of the memory budget for one graph of a step.

All graphs of a step hold their parameters, gradients and optimizer state. While one runs, those before it hold their saved
activations, and in its backward the gradients of those after it are in memory. Its own share depends on graphs that are not
compiled yet: these are assumed to need as much as this one, in proportion to their parameters, which are the optimizer's
parameters that no graph has had so far.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from hpml_compiler.optimizer_transient import OptimizerTransient, transient_of
from hpml_compiler.options import Options
from passes.errors import Infeasible

NO_LIMIT = 10**15
"""Bytes that no device has."""
UNKNOWN_REST = 0.5
"""Part of the budget share left to graphs after one that ends at a graph break, if nothing is known of them."""


@dataclass(frozen=True)
class GraphMemory:
    """Memory of one graph on a rank, in bytes. gradients: of its trained parameters. largest: the largest of these. saved:
    activations saved between its forward and its backward. copies: of state, for `redundancy`, in the memory of a CPU."""

    name: str
    parameters: float
    gradients: float
    optimizer: float
    largest: float = 0.0
    saved: float = 0.0
    copies: float = 0.0

    @property
    def state(self) -> float:
        """Bytes that are in memory all the time."""
        return self.parameters + self.optimizer + self.copies


def replicated_memory(name: str, trained: Iterable[float], frozen: Iterable[float], options: Options) -> GraphMemory:
    """Memory of a graph with parameters of these bytes, all on one device."""
    sizes = list(trained)
    return GraphMemory(name, sum(frozen) + sum(sizes), sum(sizes), options.resident_states * sum(sizes),
                       max(sizes, default=0.0))


@dataclass(frozen=True)
class BudgetShare:
    """Budget share of one graph, in bytes. available: most that it may use besides memory that is in use anyway. between,
    after: the parts of this that it leaves to later graphs when its forward is over, and to the optimizer when its backward is.
    state: parameters and optimizer state with their copies, of all graphs; later: gradients of later graphs. transient:
    temporary memory of the optimizer step; remedy: how to reduce it. others: saved activations of earlier graphs, by name.
    around_loop: memory in use around the loop over microbatches, for the loop's body. copies: of state, for `redundancy`."""

    budget: int
    available: float
    between: float
    after: float
    state: float
    later: float
    transient: float
    remedy: str
    others: Mapping[str, float]
    around_loop: float = 0.0
    copies: float = 0.0


@dataclass(frozen=True)
class StepContext:
    """State that the graphs of a step share, for one of them. frame: the Dynamo frame that it is from; replicated: its memory
    on a device that has all of its parameters; graphs: earlier graphs and, where it is recompiled, itself and later ones, by
    frame, in their order. unseen: bytes, unsharded, of the optimizer's parameters that no graph has had so far; breaks: whether
    more graphs follow in any case. copied: bytes, unsharded, of the parameters that are copied for outputs of this graph that
    are read after an optimizer's step, or later. options: with the actual optimizer, and the budget in bytes. transient:
    temporary memory of the optimizer step."""

    replicated: GraphMemory
    options: Options
    transient: OptimizerTransient
    frame: str = ""
    graphs: Mapping[str, GraphMemory] = field(default_factory=dict)
    unseen: float = 0.0
    breaks: bool = False
    copied: float = 0.0

    @staticmethod
    def unlimited(name: str, options: Options, device: str) -> StepContext:
        """For a step of one graph without a memory budget, whose memory is only counted. device: its type."""
        free = options.model_copy(update={"memory_budget": NO_LIMIT})
        return StepContext(GraphMemory(name, 0.0, 0.0, 0.0), free, transient_of(options, device))

    @property
    def budget(self) -> int:
        assert isinstance(self.options.memory_budget, int), "in bytes"
        return self.options.memory_budget

    @property
    def other_graphs_bytes(self) -> float:
        """Bytes that the other graphs hold through the step and save for backward."""
        others = (each for frame, each in self.graphs.items() if frame != self.frame)
        return sum(each.state + each.saved for each in others)

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """Values that determine the budget share, in a form that is the same in another process, where frames differ."""
        place = [*self.graphs].index(self.frame) if self.frame in self.graphs else len(self.graphs)
        return self.replicated, self.transient, tuple(self.graphs.values()), place, self.unseen, self.breaks, self.copied

    def share_of(self, mine: GraphMemory) -> BudgetShare:
        """The budget share of this graph. mine: its memory on a rank. Parameters of later graphs are assumed to be sharded in
        the same proportion."""
        states, whole = self.options.resident_states, self.replicated.gradients
        rest = self.unseen * (mine.gradients / whole if whole else 1.0)
        copied = self.copied * (mine.parameters / self.replicated.parameters if self.replicated.parameters else 1.0)
        graphs = {**self.graphs, self.frame: mine}
        place = list(graphs).index(self.frame)
        again = mine.copies / mine.gradients if mine.gradients else 0.0
        state = sum(each.state for each in graphs.values()) + (1 + states + again) * rest + copied
        later = sum(each.gradients for each in list(graphs.values())[place + 1:]) + rest
        others: dict[str, float] = defaultdict(float)
        for frame, each in self.graphs.items():
            if frame != self.frame and each.saved:
                others[each.name] += each.saved
        left = self.budget - state - later - sum(others.values())
        left_to_rest = rest / (mine.gradients + rest) if rest and mine.gradients else UNKNOWN_REST * (rest > 0 or self.breaks)
        gradients = sum(each.gradients for each in graphs.values()) + rest
        made = self.transient.bytes_of(gradients, max(each.largest for each in graphs.values()))
        after = state + gradients + made - mine.gradients - (self.budget - left)
        return BudgetShare(self.budget, left, max(left, 0.0) * left_to_rest, after, state, later, made, self.transient.remedy,
                           dict(others), copies=sum(each.copies for each in graphs.values()) + again * rest)


def raise_of_graph(step: StepContext | None, error: Exception) -> NoReturn:
    """Raise the error of one graph again. A refusal says that its budget is for this graph, where the step has others."""
    if step is not None and isinstance(error, Infeasible) and (step.breaks or {*step.graphs} - {step.frame}):
        error.next_step += "; with that budget, other graphs of the step, which a graph break separates, may need more"
    raise error

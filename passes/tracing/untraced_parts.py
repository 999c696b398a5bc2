"""Parts of a step that tracing did not reach: behind a graph break whose Python code needs values, or in further calls."""
from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

import passes
from passes import compat


@dataclass(frozen=True)
class UntracedPart:
    """reason: why it was not traced. where: file and line. parameters: names of the trainable parameters in it. used: False if
    the step computes no gradients for them."""

    reason: str
    where: str
    parameters: tuple[str, ...]
    used: bool = True


@dataclass
class GraphCalls:
    """Calls of the graphs of one step. trained: names of parameters, by id."""

    trained: Mapping[int, str]
    counts: Counter[int] = field(default_factory=Counter)
    first: set[int] = field(default_factory=set)
    """Ids of parameters among the inputs of first calls of a graph."""
    again: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    """Ids of parameters that the result has a gradient for."""
    stopped: Exception | None = None
    returned: dict[int, tuple[object, int, int]] = field(default_factory=dict)
    """Results of graphs by id: the tensor, which keeps its id, the graph, and the position among its results."""

    @staticmethod
    def of(model: nn.Module) -> GraphCalls:
        return GraphCalls({id(p): name for name, p in model.named_parameters() if p.requires_grad})

    def note(self, graph: int, arguments: Iterable[object]) -> bool:
        """Record a call; returns True if it is the graph's first."""
        self.counts[graph] += 1
        (self.first if self.counts[graph] == 1 else self.again).update(map(id, arguments))
        return self.counts[graph] == 1

    def received(self, arguments: Iterable[object]) -> dict[int, tuple[int, int]]:
        """Arguments that an earlier graph returned, by position: that graph, and the position among its results."""
        return {k: self.returned[id(x)][1:] for k, x in enumerate(arguments) if id(x) in self.returned}

    def note_results(self, graph: int | None, results: tuple) -> tuple:
        """Record the results of a graph that is planned (None: it is not), and return them."""
        if graph is not None:
            self.returned.update({id(x): (x, graph, k) for k, x in enumerate(results)})
        return results

    def note_result(self, result: object) -> None:
        """Record the step's result, which Python code may have computed from parameters that no graph takes."""
        nodes = [leaf.grad_fn for leaf in compat.pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        seen: set[object] = set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                self.reached.add(id(getattr(node, "variable", None)))
                nodes += [parent for parent, _ in node.next_functions]

    def unplanned(self) -> list[UntracedPart]:
        in_graphs, most = self.first | self.again, max(self.counts.values(), default=0)
        rest = self.trained.keys() - in_graphs
        found = [self._part(f"a graph behind a graph break is called {most} times, and one call of it is planned",
                            self.again - self.first)]
        if self.stopped is None:
            found += [self._part("Python code that Dynamo does not trace computes with them", self.reached - in_graphs),
                      replace(self._part("the step computes no gradients for them", rest - self.reached), used=False)]
        else:
            found.append(self._part(
                f"Python code behind a graph break needs values, and there are none, or fails "
                f"({type(self.stopped).__name__}: {str(self.stopped).partition(chr(10))[0]})",
                rest, line_of(self.stopped)))
        return [part for part in found if part.parameters]

    def _part(self, reason: str, ids: Set[int], where: str = "") -> UntracedPart:
        return UntracedPart(reason, where, tuple(name for key, name in self.trained.items() if key in ids))


def line_of(error: BaseException) -> str:
    """The innermost line of the model's own code that an error came from."""
    ours = [str(Path(module.__file__ or "").parent) for module in (torch, passes)]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith((*ours, "<")) and "torch_dynamo" not in frame.filename
              and "/hpml_compiler/" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""

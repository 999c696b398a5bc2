"""Compile a Dynamo graph again while the script runs, with other options."""
from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from hpml_compiler.options import Options
from hpml_compiler.session import session
from passes import compat
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.transforms.outputs.inline_graph import inline_graph

Call = Callable[..., Any]
Compile = Callable[[GraphModule, Sequence[Any], Options], Call]


class CompiledAgain:
    """A copy of a graph; to be made before the graph is compiled, which changes it. compile_: compiles a graph for options.
    name: of the graph that was compiled last, in the session."""

    def __init__(self, gm: GraphModule, compile_: Compile) -> None:
        self.name, self.frame = session.current().next_name(), compat.frame_being_compiled()
        self._graph, self._compile = copy_graph(gm), compile_
        self._sources = compat.naming_sources(gm)
        results = returned_nodes(gm)
        self._made, self._results = [k for k, node in enumerate(results) if node is not None], len(results)

    @staticmethod
    def is_possible(gm: GraphModule) -> bool:
        """True if all results are tensors."""
        return all(isinstance(node.meta.get("example_value"), torch.Tensor) for node in returned_nodes(gm) if node is not None)

    def changed(self, change: Callable[[GraphModule], Any]) -> CompiledAgain:
        """One for another version of the graph, with the same inputs and results."""
        other = copy.copy(self)
        other._graph = copy_graph(self._graph)
        change(other._graph)
        return other

    def compiled(self, options: Options) -> Call:
        """The graph, to be compiled with these options in its first call."""
        graph = self._graph

        @compat.as_one_call
        def leaf(*args: Any) -> tuple[Any, ...]:
            results = graph(*args)
            return tuple([results[k] for k in self._made])

        def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Call:
            return self._inlined(gm, leaf, example_inputs, options)

        call = torch.compile(_calling(leaf, len(self._sources), len(self._made)).forward, backend=backend, dynamic=False)

        def all_results(*args: Any) -> list[Any]:
            results: list[Any] = [None] * self._results
            for k, value in zip(self._made, call(*args), strict=True):
                results[k] = value
            return results

        return all_results

    def _inlined(self, gm: GraphModule, leaf: Call, example_inputs: Sequence[Any], options: Options) -> Call:
        given = compat.original_inputs(example_inputs)
        inner = copy_graph(self._graph)
        (output,) = inner.graph.find_nodes(op="output")
        output.args = (tuple(returned_nodes(inner)[k] for k in self._made),)
        inline_graph(gm, leaf, inner, self._sources)
        current = session.current()
        current.step.stands_for[compat.frame_being_compiled()] = self.frame
        self.name = current.next_name()
        call = self._compile(gm, given, options)
        self._replace_in_plan()
        return call

    def _replace_in_plan(self) -> None:
        """Let the plan of the session count this graph as the one that runs, and earlier ones of its frame as replaced."""
        current, frame = session.current(), {"frame": self.frame}
        current.graphs[:] = [each.model_copy(update=frame) if each.name == self.name else each for each in current.graphs]
        if (factory := current.unplanned.get(self.name)) is not None:
            current.unplanned[self.name] = lambda name: factory(name).model_copy(update=frame)


def _calling(leaf: Call, inputs: int, results: int) -> GraphModule:
    """A graph whose only call is `leaf`."""
    graph = Graph()
    call = graph.call_function(leaf, tuple(graph.placeholder(f"input_{k}") for k in range(inputs)))
    graph.output(tuple(graph.call_function(operator.getitem, (call, k)) for k in range(results)))
    return GraphModule(torch.nn.Module(), graph)

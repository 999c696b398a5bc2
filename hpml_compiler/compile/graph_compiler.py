"""The path of one Dynamo graph through the compiler: inputs, cache, trace, decide, rewrite, split, lower, install.

AOTAutograd calls back: `partition_fn` gets the joint graph, where everything is decided and rewritten, and the two compilers
get forward and backward. On a hit of the graph cache, the callbacks take their results from there, and nothing is traced,
decided or rewritten. Subclasses decide, and add the runtime wrapper around compiled code.
"""
from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.compile.cache.graph_cache import CachedGraph, GraphCache
from hpml_compiler.compile.cache.lazy_plan import LazyPlan, PlanSource
from hpml_compiler.compile.lower.compile_timer import compile_phase
from hpml_compiler.compile.lower.lowering import Call, Lowering
from hpml_compiler.compile.program.microbatch_autograd import MicrobatchAutograd
from hpml_compiler.options import Options
from hpml_compiler.runtime.placements.unsharded_params import UnshardedInputs
from hpml_compiler.session import session
from passes import compat
from passes.graph.fx_nodes import returned_nodes
from passes.hardware.cluster import Cluster
from passes.tracing.joint_trace import decompositions
from passes.tracing.named_passes import run_named_passes

Halves = Sequence[GraphModule]


class GraphCompiler(abc.ABC):
    """Compiles one graph.

    name: in messages. program: runs the step where that takes more than one call of each half, as with microbatches or stages;
    None where AOTAutograd's two halves are compiled as they are. seconds: compile time by phase.
    """

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options, name: str):
        self.gm, self.given, self.options, self.name = gm, given, options, name
        self.session = session.current()
        self.lowering = Lowering(options.compiler, blocks=options.compile_blocks)
        self.holding = UnshardedInputs()
        self.program: MicrobatchAutograd | None = None
        self.seconds: dict[str, float] = {}
        self.earlier: GraphCache

    # -- for subclasses to implement -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def split(self, joint: GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Halves | None:
        """Decide, rewrite a traced joint graph, and note it for the cache. Returns forward and backward; or sets `program`, and
        returns None."""

    @abc.abstractmethod
    def restore(self, restored: Any, found: CachedGraph, forward_outputs: int) -> None:
        """Set `program` where the cache has one. restored: the graphs of the cache entry."""

    @abc.abstractmethod
    def backward_of(self, call: Call, gm: GraphModule) -> Call:
        """A call of the backward `gm`, with its runtime wrapper."""

    def inference(self, gm: GraphModule) -> Any:
        """Rewrite a traced inference graph. Returns a graph, or stages that `run_inference` lowers."""
        return gm

    @abc.abstractmethod
    def compile(self) -> Callable[..., Any]:
        """Compile the graph. Returns the callable that replaces it in the script."""

    def run_inference(self, graph: Any) -> Call:
        return self.together("forward", lambda: self.lowering.inference(graph))

    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        return decompositions(self.options.compiler)

    def together(self, half: str, lower: Callable[[], Call]) -> Call:
        """Compile a half while the other ranks compile theirs."""
        return lower()

    # -- callbacks of AOTAutograd --------------------------------------------------------------------------------------

    def trace(self, examples: Sequence[Any]) -> Callable[..., Any]:
        """The compiled graph, as a function of plain local tensors."""
        seconds: dict[str, float] = {}
        with compile_phase("trace", f"{self.name}: tracing", seconds):
            function = compat.aot_autograd(
                fw_compiler=self._forward, bw_compiler=self._backward, inference_compiler=self._inference,
                partition_fn=self._partition, decompositions=self.decompositions(),
            )(self.earlier.graph, examples)
        self.seconds.update(seconds)
        return function

    def _partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        found = self.earlier.found
        if found is None:
            run_named_passes(self.options.passes, joint)
            self.earlier.note_results(joint, num_fwd_outputs)
            halves = self.split(joint, inputs, num_fwd_outputs, kwargs.get("static_lifetime_input_indices"))
        else:
            self.lowering.forward_outputs, self.lowering.shares = num_fwd_outputs, False
            halves = self._restored()
            self.restore(halves, found, num_fwd_outputs)
        return halves if self.program is None else self.program.partition()

    def _forward(self, gm: GraphModule, examples: Any) -> Call:
        self.earlier.note_forward()
        with self.doing("compile forward", "compiling forward"):
            call = self.program.forward() if self.program is not None else (
                self.together("forward", lambda: self.lowering.forward(gm, examples)))
        return self.holding.around(gm, call)

    def _backward(self, gm: GraphModule, inputs: Any) -> Call:
        call = self.program.backward() if self.program is not None else (  # already compiled, with forward
            self.together("backward", lambda: self._compiled_backward(gm, inputs)))
        return self.backward_of(call, gm)

    def _compiled_backward(self, gm: GraphModule, inputs: Any) -> Call:
        self.earlier.note_backward()
        with self.doing("compile backward", "compiling backward"), compat.restrict_overwriting(self.earlier.writes_over):
            return self.lowering.backward(gm, inputs)

    def _inference(self, gm: GraphModule, _: Any) -> Call:
        if self.earlier.found is not None:
            graph = self._restored()
        else:
            run_named_passes(self.options.passes, gm)
            self.earlier.note_results(gm, None)
            graph = self.inference(gm)
            self.earlier.note(graph)
        self.earlier.note_forward()
        with self.doing("compile forward", "compiling forward"):
            call = self.run_inference(graph)
        return self.holding.around(gm, call)

    def _restored(self) -> Any:
        with self.doing("restore", "reading what it was rewritten to"):
            return self.earlier.restored()

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def halves(self, joint: GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Halves:
        """Forward and backward of a rewritten graph, noted for the cache."""
        halves = self.lowering.partition(joint, inputs, forward_outputs, static_inputs)
        self.note_halves(halves)
        return halves

    def note_halves(self, halves: Halves, unplanned: PlanSource | None = None) -> None:
        """Note the halves for the cache, before they are compiled."""
        self.earlier.note(halves, (node and node.meta["val"] for node in returned_nodes(halves[0])), unplanned)

    def plan_later(self, unplanned: PlanSource | bytes, cluster: Cluster) -> None:
        """Enter a plan for this graph in the session that is made on demand."""
        reports = {} if self.program is None else self.program.reports
        self.session.enter(LazyPlan(unplanned, self.seconds, reports), self.options, str(cluster))
        session.save_plan()

    def doing(self, what: str, text: str) -> compile_phase:
        return compile_phase(what, f"{self.name}: {text}", self.seconds)

"""One graph of a step, with everything that decisions about it depend on: the input of `hpml_compiler.planner.decide`."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.plans.from_decision.graph_record import SHORTENED
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_copy import copy_graph
from passes.hardware.cluster import Cluster
from passes.solver.work_limit import WorkLimit
from passes.tracing.joint_trace import JointTrace


@dataclass(frozen=True)
class StepProblem:
    """name: of the graph. analyze: analyzes the graph for planning; with microbatches or stages, with gradients at the loss
    alone. forward_outputs: None for an inference graph. options: under a budget, with the budget in bytes. cluster: all
    devices. allowance: work limit for all decisions. microbatches: as many as its rows divide into. traced: the graph before
    any pass, where it may be needed once more; own: the same, which deciding may change, instead of a copy. analyze_full:
    analyzes the graph for a step that cannot go through microbatches.

    kept_gradients: places of the outputs that go to `.grad`. written: positions of inputs that a call mutates. sharing: under a
    memory budget, what the graphs of the step share. folded: the deeper model of which a few layers were traced. fixed_mesh:
    mesh of earlier graphs, which this one has to share. rows: names of inputs that are this rank's rows of a batch. device:
    type of the device that will run the graph, "" if its tensors are on it. hurried: the step is one of many candidates.
    """

    name: str
    analyze: Callable[[], AnalyzedGraph]
    forward_outputs: int | None
    options: Options
    cluster: Cluster
    allowance: WorkLimit
    microbatches: int = 1
    traced: JointTrace | None = None
    own: GraphModule | None = None
    analyze_full: Callable[[], AnalyzedGraph] | None = None
    kept_gradients: Sequence[int] = ()
    written: frozenset[int] = frozenset()
    sharing: StepContext | None = None
    folded: FewLayerTrace | None = None
    fixed_mesh: Mapping[str, int] | None = None
    rows: frozenset[str] = frozenset()
    device: str = ""
    hurried: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "analyze", cache(self.analyze))  # copies of the problem share one analysis

    @cached_property
    def annotated(self) -> AnalyzedGraph:
        return self.analyze()

    @property
    def graph_hash(self) -> str:
        """Hash of the graph in its plan."""
        return ("" if self.folded is None else SHORTENED) + self.annotated.hash()

    @property
    def outputs(self) -> int:
        """Number of forward's outputs of a joint graph."""
        assert self.forward_outputs is not None, "an inference graph has no backward"
        return self.forward_outputs

    def joint(self) -> GraphModule:
        """The graph before any pass, to be changed."""
        if self.own is not None:
            return self.own
        assert self.traced is not None, "this decision is made on the traced graph"
        return copy_graph(self.traced.gm)

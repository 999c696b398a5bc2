"""The joint graph of a run, for planning with other options than those that it was compiled with: nothing is traced again."""
from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from torch import nn

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.planner.traced_model import ALL_LAYERS, Known, TracedModel
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.graph.graph_copy import copy_graph
from passes.tracing.joint_trace import JointTrace


class CapturedModel(TracedModel):
    """captured: the graph, with all layers, before any pass. trainable: bytes of its trained parameters, by name. sharing: the
    memory that it shares with the other graphs of its step. quick: the quick profile of this run, if it took one."""

    def __init__(self, captured: JointTrace, options: Options, trainable: dict[str, float], sharing: StepContext,
                 known: Known | None = None, quick: CachedMeasurements | None = None):
        super().__init__(nn.Module(), None, options, known={} if known is None else known)
        self.captured, self.trainable, self.context, self.of_devices = captured, trainable, sharing, quick

    def with_options(self, options: Options) -> CapturedModel:
        return CapturedModel(self.captured, options, self.trainable, self.context, self.known, self.of_devices)

    @cached_property
    def traced(self) -> list[JointTrace]:
        return self._known(ALL_LAYERS, lambda: [replace(self.captured, gm=copy_graph(self.captured.gm))])

    @property
    def sharing(self) -> StepContext:
        return self.context

    @property
    def quick(self) -> CachedMeasurements | None:
        return self.of_devices

    @property
    def trained(self) -> dict[str, float]:
        return self.trainable

"""One rank's view of a plan: bytes, sources and views of its operations."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from hpml_compiler.plans.peak_memory import fixed_values
from hpml_compiler.plans.record_fields import Shape
from hpml_compiler.plans.schema import GraphPlan, Redistribution
from hpml_compiler.simulate.checkpointing_view import CheckpointingView
from passes.cost_model.efficiency_curves import item_bytes
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.hardware.axis import Axes, device_axes
from passes.op_rules.base import parse_placement
from passes.simulation.step_graph import StepCall, When, returned_gradients, with_gradients


def placed_bytes(shape: Shape, dtype: str, placements: Sequence[str], axes: Axes) -> float:
    """Bytes on one rank of a value with the unsharded shape `shape`."""
    shards = math.prod(axis.size for axis, place in zip(axes, placements) if place.startswith("S"))
    return math.prod(shape) * item_bytes(dtype) / shards


def values_of_parameters(graph: GraphPlan, names: Iterable[str]) -> dict[str, str]:
    """Parameter by value, for these parameters and what is computed from one of them alone."""
    found = {name: name for name in names}
    for name, operation in graph.operations.items():
        if len(operation.sources) == 1 and operation.sources[0] in found:
            found[name] = found[operation.sources[0]]
    return found


class LocalView:
    """Look-ups in the plan of one graph. obeys_kept: take saved values from the plan's activation checkpointing, if it has one;
    otherwise they are those that torch's partitioner would save. unlisted: that activation checkpointing where one listed layer
    stands for several, which may save different values."""

    def __init__(self, graph: GraphPlan, obeys_kept: bool = True):
        self.graph, self.axes = graph, device_axes(graph.mesh)
        listed_whole = not graph.multiplicity  # else layers may differ in saved values from the listed one
        view = CheckpointingView(graph, graph.kept) if graph.kept is not None and obeys_kept else None
        self.kept = view if listed_whole else None
        self.unlisted = None if listed_whole else view

    @cached_property
    def calls(self) -> tuple[StepCall, ...]:
        """The calls of the graph, without times and bytes."""
        from passes.analyses.inductor_fusion import is_costly, is_fusing_target, is_inlined
        from passes.op_rules.families.convolutions import OPERANDS
        from passes.op_rules.rule_table import name_of, operator_of

        found = tuple(
            StepCall(
                name=name,
                phase=BACKWARD if each.backward else FORWARD,
                block=each.block,
                us=0.0,
                reads=tuple(zip(each.sources, each.inputs)),
                saved=each.saved if self.kept is None else self.kept.saved[name],
                view_of=each.sources[0] if each.sources and operator_of(each.op).view else None,
                scratch_bytes=self._scratch_bytes(name, OPERANDS.get(name_of(each.op), 0)),
                kernel=each.kind,
                inlined=is_inlined(each.op),
                fusing=is_fusing_target(each.op),
                costly=is_costly(each.op),
                runs=self.graph.runs(each),
                again_us=None if self.kept is None else self.kept.again_us.get(name),
                offload_us=0.0 if self.kept is None else self.kept.offload_us.get(name, 0.0),
                when=self.when.get(name, "loop"),
            ) for name, each in self.graph.operations.items())
        return with_gradients(found) if self.graph.training else found

    def _scratch_bytes(self, name: str, operands: int) -> float:
        """Temporary memory of a convolution on a CPU. operands: how many it has, of which the weight is the last; 0 for
        others."""
        from passes.op_rules.families.convolutions import scratch_bytes

        operation = self.graph.operations[name]
        read = list(zip(operation.sources, operation.inputs))[:operands]
        if not read:
            return 0.0
        weight = self.graph.parameters.get(read[-1][0])
        if weight is None:  # computed, as under autocast, which has no float64
            return (operands - 1) * self.bytes_of(*read[-1])
        out_bytes = self.bytes_of(name, ()) if operands == 2 else self.bytes_of(*read[0])
        shape = [float(size) for size in weight.shape]
        for axis, place in zip(self.axes, read[-1][1]):
            if isinstance(placement := parse_placement(place), tuple):
                shape[placement[0]] /= axis.size
        return scratch_bytes(operands, shape, out_bytes, item_bytes(weight.dtype))

    @cached_property
    def fixed(self) -> frozenset[str]:
        """See `hpml_compiler.plans.peak_memory.fixed_values`."""
        return fixed_values(self.graph)

    @cached_property
    def when(self) -> Mapping[str, When]:
        """"before" or "after" for the operations outside of the microbatch loop."""
        said = self.graph.microbatches
        before, after = ((), ()) if said is None else (said.before, said.after)
        return {**dict.fromkeys(before, "before"), **dict.fromkeys(after, "after")}

    def is_whole(self, name: str) -> bool:
        """True if a value's size, or an operation's work, does not shrink with the rows."""
        return name in self.fixed or name in self.when or name in self.repeated

    @cached_property
    def repeated(self) -> frozenset[str]:
        """Operations on parameters that each microbatch repeats."""
        return frozenset(() if self.graph.microbatches is None else self.graph.microbatches.repeated)

    @cached_property
    def gathered(self) -> frozenset[str]:
        """Values that are gathered in each microbatch: parameters, and what is computed from their shards alone."""
        return frozenset(values_of_parameters(self.graph, self.graph.microbatches.gathered) if self.graph.microbatches else ())

    @cached_property
    def reduced(self) -> frozenset[str]:
        """Gradients that are reduced in each microbatch."""
        said = self.graph.microbatches
        return frozenset(self.graph.parameters[name].gradient for name in (() if said is None else said.reduced)
                         if name in self.graph.parameters)

    @cached_property
    def gradients(self) -> frozenset[str]:
        """Sums over rows, such as gradients, whose size does not depend on the rows."""
        sums = self.graph.microbatches.sums if self.graph.microbatches is not None else ()
        return (returned_gradients(self.calls) if self.graph.training else frozenset()).union(sums)

    def is_gradient(self, move: Redistribution) -> bool:
        """True if a redistribution reduces a gradient for the optimizer."""
        made = self.graph.operations.get(move.value)
        return self.graph.training and move.consumer == "" and made is not None and made.backward

    def bytes_of(self, name: str, placements: Sequence[str]) -> float:
        """Bytes of a parameter or of an operation's results on one rank; 0 for other arguments."""
        if name in self.graph.parameters:
            parameter = self.graph.parameters[name]
            return placed_bytes(parameter.shape, parameter.dtype, placements, self.axes)
        operation = self.graph.operations.get(name)
        return float(sum(operation.result_bytes)) if operation else 0.0

    def fixed_bytes(self, name: str) -> float:
        """Bytes of an operation's memory traffic that do not shrink with the rows: weights read, gradients written."""
        operation = self.graph.operations[name]
        pairs = dict(zip(operation.sources, operation.inputs))
        read = sum(self.bytes_of(source, placements) for source, placements in pairs.items() if source in self.fixed)
        made = float(sum(operation.result_bytes)) if name in self.fixed or name in self.gradients else 0.0
        return min(read + made, operation.bytes_moved)

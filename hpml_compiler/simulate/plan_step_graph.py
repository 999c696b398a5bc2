"""Build the simulator's step graph from a plan's records: one rank's work on a part of the rows, in plain numbers."""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from hpml_compiler.plans.schema import GraphPlan, Redistribution
from hpml_compiler.simulate.local_sizes import LocalView, placed_bytes
from hpml_compiler.simulate.plan_prices import PlanPrices
from passes.simulation.step_graph import StepCall, StepGraph, Transfer, TransferHop


def step_graph(graph: GraphPlan, prices: PlanPrices, part: float = 1.0, obeys_kept: bool = True) -> StepGraph:
    """Build the step graph of one graph's plan. part: share of the rows in a microbatch, if the plan has no microbatches of its
    own. obeys_kept: as in `LocalView`."""
    view = LocalView(graph, obeys_kept)
    said = graph.microbatches
    part = part if said is None else 1.0 / said.count
    legs = tuple(_leg(view, each, prices, part) for each in graph.redistributions)
    return StepGraph(
        name=graph.name,
        training=graph.training,
        calls=tuple(_call(view, call, prices, part) for call in view.calls),
        legs=_first_of_each(legs),
        tangents={name: nbytes * part for name, nbytes in graph.tangents.items()},
        parameter_bytes=graph.memory.parameters,
        gradient_bytes=graph.memory.gradients,
        optimizer_bytes=graph.memory.optimizer,
        call_us=prices.call_us(),
        accumulate_us=prices.accumulate_us(),
        optimizer_us=prices.optimizer_us(),
        again_us=_again_us(view, prices, part),
        microbatches=1 if said is None else said.count,
        at_once=said is None or said.loss_inside,
    )


def _call(view: LocalView, call: StepCall, prices: PlanPrices, part: float) -> StepCall:
    share = 1.0 if view.is_whole(call.name) or call.gradient or call.name in view.gradients else part
    operation, us = view.graph.operations[call.name], prices.operation_us(call.name, part)
    again_us = call.again_us  # from the plan, scaled with the price of the operation
    if again_us is not None:
        again_us *= us / operation.predicted_us if operation.predicted_us else part
    return replace(call, us=us, result_bytes=tuple(nbytes * share for nbytes in operation.result_bytes), again_us=again_us,
                   offload_us=call.offload_us * (part if call.when == "loop" else 1.0))


def _again_us(view: LocalView, prices: PlanPrices, part: float) -> dict[str, float]:
    """Recomputation in each layer that no listed call stands for, scaled with the price of forward."""
    if view.unlisted is None:
        return {}
    forward = {name: each.predicted_us for name, each in view.graph.operations.items() if not each.backward}
    planned_us = sum(forward.values())
    scale = sum(prices.operation_us(name, part) for name in forward) / planned_us if planned_us else part
    return {kind: us * scale for kind, us in view.unlisted.us_of_layers.items()}


def _leg(view: LocalView, move: Redistribution, prices: PlanPrices, part: float) -> Transfer:
    gradient = view.is_gradient(move)
    share = 1.0 if gradient or (move.consumer and view.is_whole(move.value)) else part
    before = view.graph.microbatches is not None and move.value not in view.gathered and (
        move.value in view.graph.parameters or view.when.get(move.value) == "before")
    return Transfer(
        value=move.value,
        reader=move.consumer,
        source=move.source,
        target=move.target,
        hops=tuple(TransferHop(hop.collective, hop.axis, hop.bytes, prices.hop_us(move, hop, part),
                               prices.link_j(move, hop, part), view.graph.mesh.get(hop.axis, 1)) for hop in move.hops),
        result_bytes=0.0 if move.held else placed_bytes(move.shape, move.dtype, move.target, view.axes) * share,
        dtype=move.dtype,
        gradient=gradient,
        multiplicity=move.multiplicity,
        once=move.held or before,
        each=gradient and move.value in view.reduced,
    )


def _first_of_each(legs: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Values that are redistributed before the loop are there for forward and backward: each way once."""
    first: dict[Hashable, Transfer] = {}
    return tuple(leg for leg in legs if not leg.once or first.setdefault((leg.value, leg.source, leg.target), leg) is leg)

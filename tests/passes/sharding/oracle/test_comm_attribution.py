"""Layouts and routes -> paid hops by reader, and shared ones."""
from __future__ import annotations

from dataclasses import replace

import pytest

from passes.graph.decision import Decision, Hop, OperationLayouts, Route
from passes.graph.step_phase import BACKWARD, FORWARD, Phase
from passes.json_records import FrozenMap
from passes.sharding.grouping.op_groups import groups_of
from passes.sharding.oracle.comm_attribution import CommAttribution
from passes.solver.verification import VerificationError
from tests.helpers.axes import axes_of
from tests.passes.graphs import Builder, V, aten

R, P, ROWS, COLUMNS = ("R",), ("P",), ((0, 0),), ((1, 0),)


def hops(*layouts, phase: Phase = FORWARD) -> tuple[Hop, ...]:
    return tuple(Hop(layout, phase) for layout in layouts)


def step():
    """exp(x) is read by two products in forward and by two in backward; w in forward and in backward."""
    b = Builder()
    x, w = b.input((8, 8)), b.input((8, 8), "parameter")
    e = b.call(aten.exp.default, V(x))
    first, second = (b.call(aten.mm.default, V(e), V(w)) for _ in range(2))
    b.backward = True
    tangent = b.input((8, 8), "tangent")
    gradient = b.call(aten.mm.default, V(e), V(tangent))
    other = b.call(aten.mm.default, V(e), V(w))
    return b.finish([first, second, (gradient, w), other]), e, w


def decided(graph, e, w) -> Decision:
    """exp comes in columns and is gathered for all; backward scatters it again, which both there start from; one of them
    reads it in rows. w is stored in rows and gathered by each phase."""
    gathered = hops(R)
    there = gathered + hops(COLUMNS, phase=BACKWARD)
    whole = OperationLayouts((R, R), (R,), (R,))
    tangent = next(v.index for v in graph.values if v.kind == "tangent")
    first, second, gradient, other = (graph.operations[k].outputs[0] for k in (1, 2, 3, 4))
    return Decision(
        axes_of(2),
        FrozenMap({0: COLUMNS, 1: ROWS, tangent: R}),
        FrozenMap({
            0: OperationLayouts((COLUMNS,), (COLUMNS,), (COLUMNS,)), 1: whole, 2: whole,
            3: OperationLayouts((COLUMNS, ROWS), (P,), (P,)), 4: OperationLayouts((ROWS, R), (ROWS,), (ROWS,)),
        }),
        FrozenMap({
            (0, 0): Route(0, COLUMNS),
            (1, 0): Route(e, COLUMNS, gathered), (1, 1): Route(w, ROWS, hops(R)),
            (2, 0): Route(e, COLUMNS, gathered), (2, 1): Route(w, ROWS, hops(R)),
            (3, 0): Route(e, COLUMNS, there), (3, 1): Route(tangent, R, hops(ROWS, phase=BACKWARD)),
            (4, 0): Route(e, COLUMNS, there + hops(ROWS, phase=BACKWARD)), (4, 1): Route(w, ROWS, hops(R, phase=BACKWARD)),
        }),
        (Route(first, R), Route(second, R), Route(gradient, P, hops(ROWS, phase=BACKWARD)),
         Route(other, ROWS, hops(R, phase=BACKWARD))),
        FrozenMap({(e, FORWARD): R, (e, BACKWARD): COLUMNS, (w, FORWARD): R}),
    )


def with_route(decision: Decision, key: tuple[int, int], route: Route) -> Decision:
    return replace(decision, routes=FrozenMap({**decision.routes, key: route}))


def with_copies(decision: Decision, copies) -> Decision:
    return replace(decision, copies=FrozenMap(copies))


def found(graph, held, decision) -> CommAttribution:
    return CommAttribution(graph, groups_of(graph, merge=False), held, decision)


def test_a_shared_copy_is_paid_once_and_backward_starts_from_it():
    graph, e, w = step()
    legs = found(graph, frozenset({e}), decided(graph, e, w))
    by_value = {v: [(leg.start, leg.stop, leg.gradient) for leg in legs.legs if leg.route.value == v] for v in (e, w)}
    assert by_value[e] == [(0, 1, False), (1, 2, False), (2, 3, False)]  # to the copy, to backward's, one reader's own
    assert by_value[w] == [(0, 1, False), (0, 1, False)]  # forward's copy, and backward's only reader from where it is stored
    assert legs.saved == {e: R}
    assert [leg.start for leg in legs.legs if leg.gradient] == [0]


def test_what_forward_does_not_share_is_saved_as_it_is_made():
    graph, e, w = step()
    first = graph.operations[1].outputs[0]
    assert found(graph, frozenset({e, first}), decided(graph, e, w)).saved == {e: R, first: R}


@pytest.mark.parametrize(("change", "message"), [
    (lambda d, e, w: with_copies(d, {(w, FORWARD): R, (e, BACKWARD): COLUMNS}), "share no copy"),
    (lambda d, e, w: with_copies(d, {(w, FORWARD): R, (e, FORWARD): R}), "in backward, but share no copy"),
    (lambda d, e, w: with_copies(d, {**d.copies, (e, BACKWARD): P}), "do not meet"),
    (lambda d, e, w: with_route(d, (3, 0), Route(e, COLUMNS)), "do not meet"),
    (lambda d, e, w: with_route(d, (4, 1), Route(w, ROWS, hops(R))), "moves in another phase"),
    (lambda d, e, w: with_route(d, (4, 1), Route(w, R)), "does not lead to"),
    (lambda d, e, w: replace(d, outputs=(*d.outputs[:2], replace(d.outputs[2], hops=()), d.outputs[3])), "does not lead to"),
])
def test_routes_that_do_not_go_together_are_refused(change, message):
    graph, e, w = step()
    with pytest.raises(VerificationError, match=message):
        found(graph, frozenset({e}), change(decided(graph, e, w), e, w))


def test_inside_a_group_a_slice_is_free_and_nothing_else_is_allowed():
    b = Builder()
    x = b.input((8, 8))
    mask = b.call(aten.exp.default, V(x), ruled=False)
    b.call(aten.relu.default, V(mask))
    graph = b.finish([2])
    (group,) = groups_of(graph, merge=False)[:1]
    both = type(group)(0, (0, 1), (x,), (2,), group.phase, group.block)
    rows = {0: OperationLayouts((R,), (R,), (R,)), 1: OperationLayouts((ROWS,), (ROWS,), (ROWS,))}
    routes = {(0, 0): Route(x, R), (1, 0): Route(mask, R, hops(ROWS))}
    decision = Decision(axes_of(2), FrozenMap({0: R}), FrozenMap(rows), FrozenMap(routes), (Route(2, ROWS, hops(R)),))
    legs = CommAttribution(graph, [both], frozenset(), decision)
    assert [(leg.route.value, leg.start, leg.stop) for leg in legs.legs] == [(2, 0, 1)]
    rows[0], routes[1, 0] = OperationLayouts((R,), (COLUMNS,), (COLUMNS,)), Route(mask, COLUMNS, hops(R, ROWS))
    with pytest.raises(VerificationError, match="inside a group"):
        CommAttribution(graph, [both], frozenset(), replace(decision, operations=FrozenMap(rows), routes=FrozenMap(routes)))

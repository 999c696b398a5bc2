"""A decision before -> its cost, found without the problem that it was decided by, after; tampering shows."""
from __future__ import annotations

from dataclasses import replace

import pytest

from passes.graph.decision import Decision, Hop, OperationLayouts, Route, Way
from passes.partition import place as placing
from passes.partition.build import PlacementProblem
from passes.partition.decode import decode, paid_ways
from passes.partition.place import place
from passes.partition.reprice import reprice
from passes.partition.state import StateModel
from passes.records import FrozenMap
from passes.solve.verify import VerificationError
from tests.passes.graphs import Builder, Prices, V, aten
from tests.passes.partition.test_build import training_step
from tests.passes.partition.test_folding import layers

SPLIT = Prices(us_per_flop=10.0)


def cost_of(placed, graph, decision=None, prices=SPLIT, state=None):
    decision = decision or placed.decision
    built = placed.problem
    return reprice(graph, built.groups, built.saved, decision, prices, state or StateModel(),
                   paid_ways(built, placed.solution))


def test_the_cost_of_a_product_over_a_split_sum_by_hand():
    b = Builder()
    x, w = b.input((8, 4), "buffer"), b.input((4, 6), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    graph = b.finish([y])
    prices = Prices(us_per_flop=1.0, memory=0.0)
    split = {"parameter_1": ((), ("S(0)",)), "op_0": (("S(1)", "S(0)"), ("P",))}
    placed = place(graph, {"x": 2}, prices, pinned=split)
    cost = placed.cost
    assert cost.compute_us == 2 * 8 * 4 * 6 / 2 + 0.5
    assert cost.communication_us == pytest.approx(0.001 + 2 * (2 + 0.01 * 8 * 6 * 4))  # slice of x, all_reduce of y
    assert (cost.optimizer_us, cost.gradient_bytes, cost.optimizer_bytes, cost.activation_bytes) == (0, 0, 0, 0)
    assert cost.parameter_bytes == 4 * 6 * 4 / 2
    assert cost.step_us == cost.compute_us + cost.communication_us


def test_state_follows_the_storage_of_trained_parameters():
    graph, _ = training_step()
    for stored, share in ((("R",), 1), (((0, 0),), 1 / 2)):
        placed = place(graph, {"x": 2}, SPLIT, stored={"parameter_1": stored}, state=StateModel(1.0, 2.0))
        assert placed.cost.parameter_bytes == placed.cost.gradient_bytes == 96 * share
        assert placed.cost.optimizer_bytes == 2 * 96 * share
        assert placed.cost.optimizer_us == pytest.approx(24 * share * 0.02)


def test_parts_add_up():
    graph, _ = training_step()
    cost = place(graph, {"x": 2}, SPLIT).cost
    assert cost.step_us == cost.compute_us + cost.communication_us + cost.optimizer_us
    assert cost.held_bytes == (
        cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes + cost.activation_bytes)
    assert cost.activation_bytes > 0 < cost.communication_us


def left_whole(decision: Decision, index: int) -> Decision:
    """The decision, but for one operation that every rank does whole."""
    rows = decision.operations[index]
    whole = OperationLayouts(*(tuple(("R",) for _ in side) for side in (rows.inputs, rows.made, rows.outputs)))
    assert rows != whole
    return replace(decision, operations=FrozenMap({**decision.operations, index: whole}))


def test_a_decision_that_was_changed_costs_something_else():
    graph, _ = training_step()
    placed = place(graph, {"x": 2}, SPLIT)
    assert cost_of(placed, graph) == placed.cost
    for op in graph.operations:
        if op.heavy:
            other = left_whole(placed.decision, op.index)
            assert cost_of(placed, graph, other).compute_us > placed.cost.compute_us
    assert placed.decision.inputs[1] != ("R",)
    stored = replace(placed.decision, inputs=FrozenMap({**placed.decision.inputs, 1: ("R",)}))
    assert cost_of(placed, graph, stored).held_bytes > placed.cost.held_bytes


def test_an_illegal_step_is_refused():
    graph, values = training_step()
    placed = place(graph, {"x": 2}, SPLIT)
    way = Way(Route(values["y"], ("R",), (Hop(("P",), False),)), 0, 1, saved=False, gradient=False)
    with pytest.raises(AssertionError, match="illegal step"):
        reprice(graph, placed.problem.groups, placed.problem.saved, placed.decision, SPLIT, StateModel(), [way])


@pytest.fixture
def tampering(monkeypatch):
    """`tampering(change)`: from now on, problems that `place` builds are changed after they are built."""

    def install(change):
        class Tampered(PlacementProblem):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self.problem = change(self.problem)

        monkeypatch.setattr(placing, "PlacementProblem", Tampered)

    return install


def deep():
    b = layers(3)
    return b.finish([len(b.values) - 1])


def one_more(items, index):
    return tuple(replace(x, multiplicity=x.multiplicity + 1) if k == index else x for k, x in enumerate(items))


def heavy(problem):
    return next(k for k, e in enumerate(problem.entities) if e.multiplicity == 3 and e.choices[0].cost_us > 0)


def without_a_charge(problem):
    k = heavy(problem)
    entity = problem.entities[k]
    cheaper = replace(entity, choices=tuple(replace(c, cost_us=c.cost_us * 0.999) for c in entity.choices))
    return replace(problem, entities=(*problem.entities[:k], cheaper, *problem.entities[k + 1:]))


def heavier(problem):
    k = next(k for k, e in enumerate(problem.entities) if e.kind == "parameter")
    entity = problem.entities[k]
    changed = replace(entity, choices=tuple(replace(c, held_bytes=c.held_bytes + 1) for c in entity.choices))
    return replace(problem, entities=(*problem.entities[:k], changed, *problem.entities[k + 1:]))


@pytest.mark.parametrize(("change", "what"), [
    (lambda p: replace(p, entities=one_more(p.entities, heavy(p))), "objective"),
    (without_a_charge, "objective"),
    (lambda p: replace(p, edges=tuple(replace(e, multiplicity=e.multiplicity + 1) for e in p.edges)), "objective"),
    (heavier, "held bytes"),
])
def test_a_problem_that_miscounts_is_found_out(tampering, change, what):
    graph = deep()
    place(graph, {"x": 2}, SPLIT)
    tampering(change)
    with pytest.raises(VerificationError, match=what):
        place(graph, {"x": 2}, SPLIT)


def test_a_decision_that_is_decoded_wrongly_is_found_out(monkeypatch):
    graph = deep()

    def wrong(built, solution):
        decision = decode(built, solution)
        index = next(i for i, op in enumerate(graph.operations) if op.heavy)
        return left_whole(decision, index)

    monkeypatch.setattr(placing, "decode", wrong)
    with pytest.raises(VerificationError, match="objective"):
        place(graph, {"x": 2}, SPLIT)

"""A decision before -> its cost, found without the problem that it was decided by, after; tampering shows."""
from __future__ import annotations

from dataclasses import replace

import pytest

from passes.graph.decision import Decision, Hop, OperationLayouts
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.json_records import FrozenMap
from passes.sharding.formulation.decision_decoder import decode
from passes.sharding.formulation.placement_problem import PlacementProblem
from passes.sharding.formulation.problem_edges import ProblemEdges
from passes.sharding.formulation.problem_entities import ProblemEntities
from passes.sharding.oracle.cost_check import recompute_cost
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.search import mesh_placement
from passes.sharding.search.mesh_placement import solve_on_mesh
from passes.solver.verification import VerificationError
from tests.helpers.axes import axes_of
from tests.passes.graphs import Builder, Prices, V, aten
from tests.passes.sharding.formulation.test_placement_problem import training_step
from tests.passes.sharding.grouping.test_group_symmetry import layers

SPLIT = Prices(us_per_flop=10.0)


def cost_of(placed, graph, decision=None, prices=SPLIT, state=None):
    decision = decision or placed.decision
    built = placed.problem
    return recompute_cost(graph, built.groups, built.saved, decision, prices, state or TrainingStateModel())


def test_the_cost_of_a_product_over_a_split_sum_by_hand():
    b = Builder()
    x, w = b.input((8, 4), "buffer"), b.input((4, 6), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    graph = b.finish([y])
    prices = Prices(us_per_flop=1.0, memory=0.0)
    split = {"parameter_1": ((), ("S(0)",)), "op_0": (("S(1)", "S(0)"), ("P",))}
    placed = solve_on_mesh(graph, axes_of(2), prices, pinned=split)
    cost = placed.cost
    assert cost.compute == 2 * 8 * 4 * 6 / 2 + 0.5
    assert cost.communication == pytest.approx(0.001 + 2 * (2 + 0.01 * 8 * 6 * 4))  # slice of x, all_reduce of y
    assert (cost.optimizer, cost.gradient_bytes, cost.optimizer_bytes, cost.activation_bytes) == (0, 0, 0, 0)
    assert cost.parameter_bytes == 4 * 6 * 4 / 2
    assert cost.step == cost.compute + cost.communication


def test_state_follows_the_storage_of_trained_parameters():
    graph, _ = training_step()
    for stored, share in ((("R",), 1), (((0, 0),), 1 / 2)):
        placed = solve_on_mesh(graph, axes_of(2), SPLIT, stored={"parameter_1": stored}, state=TrainingStateModel(1.0, 2.0))
        assert placed.cost.parameter_bytes == placed.cost.gradient_bytes == 96 * share
        assert placed.cost.optimizer_bytes == 2 * 96 * share
        assert placed.cost.optimizer == pytest.approx(24 * share * 0.02)


def test_parts_add_up():
    graph, _ = training_step()
    cost = solve_on_mesh(graph, axes_of(2), SPLIT).cost
    assert cost.step == cost.compute + cost.communication + cost.optimizer
    assert cost.held_bytes == (
        cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes + cost.activation_bytes)
    assert cost.activation_bytes > 0 < cost.communication


def left_whole(decision: Decision, index: int) -> Decision:
    """The decision, but for one operation that every rank does whole."""
    rows = decision.operations[index]
    whole = OperationLayouts(*(tuple(("R",) for _ in side) for side in (rows.inputs, rows.made, rows.outputs)))
    assert rows != whole
    return replace(decision, operations=FrozenMap({**decision.operations, index: whole}))


def test_a_decision_that_was_changed_costs_something_else():
    graph, _ = training_step()
    placed = solve_on_mesh(graph, axes_of(2), SPLIT)
    assert cost_of(placed, graph) == placed.cost
    for op in graph.operations:
        if op.heavy:
            with pytest.raises(VerificationError, match="does not lead to"):
                cost_of(placed, graph, left_whole(placed.decision, op.index))
    dearer = Prices(us_per_flop=20.0)
    assert cost_of(placed, graph, prices=dearer).compute > placed.cost.compute


def test_an_illegal_step_is_refused():
    graph, _ = training_step()
    placed = solve_on_mesh(graph, axes_of(2), SPLIT)
    for key, route in placed.decision.routes.items():
        if len(route.hops) == 1:
            around = replace(route, hops=(Hop(("P",), route.hops[0].phase), *route.hops))
            with pytest.raises(VerificationError):
                cost_of(placed, graph, replace(placed.decision, routes=FrozenMap({**placed.decision.routes, key: around})))


@pytest.fixture
def tampering(monkeypatch):
    """`tampering(change)`: from now on, problems that `solve_on_mesh` builds are changed after they are built."""

    def install(change):
        class Tampered(PlacementProblem):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self.problem = change(self.problem)

        monkeypatch.setattr(mesh_placement, "PlacementProblem", Tampered)

    return install


def deep():
    b = layers(3)
    return b.finish([len(b.values) - 1])


def one_more(items, index):
    return tuple(replace(x, multiplicity=x.multiplicity + 1) if k == index else x for k, x in enumerate(items))


def heavy(problem):
    return next(k for k, e in enumerate(problem.entities) if e.multiplicity == 3 and e.choices[0].cost > 0)


def without_a_charge(problem):
    k = heavy(problem)
    entity = problem.entities[k]
    cheaper = replace(entity, choices=tuple(replace(c, cost=c.cost * 0.999) for c in entity.choices))
    return replace(problem, entities=(*problem.entities[:k], cheaper, *problem.entities[k + 1:]))


def heavier(problem):
    k = next(k for k, e in enumerate(problem.entities) if e.kind == "parameter")
    entity = problem.entities[k]
    changed = replace(entity, choices=tuple(replace(c, held_bytes=(c.held_bytes[0] + 1,)) for c in entity.choices))
    return replace(problem, entities=(*problem.entities[:k], changed, *problem.entities[k + 1:]))


@pytest.mark.parametrize(("change", "what"), [
    (lambda p: replace(p, entities=one_more(p.entities, heavy(p))), "objective"),
    (without_a_charge, "objective"),
    (lambda p: replace(p, edges=tuple(replace(e, multiplicity=e.multiplicity + 1) for e in p.edges)), "objective"),
    (heavier, "held bytes"),
])
def test_a_problem_that_miscounts_is_found_out(tampering, change, what):
    graph = deep()
    solve_on_mesh(graph, axes_of(2), SPLIT)
    tampering(change)
    with pytest.raises(VerificationError, match=what):
        solve_on_mesh(graph, axes_of(2), SPLIT)


def test_a_decision_that_is_decoded_wrongly_is_found_out(monkeypatch):
    graph = deep()

    def wrong(built, solution):
        decision = decode(built, solution)
        index = next(i for i, op in enumerate(graph.operations) if op.heavy)
        return left_whole(decision, index)

    monkeypatch.setattr(mesh_placement, "decode", wrong)
    with pytest.raises(VerificationError, match="does not lead to"):
        solve_on_mesh(graph, axes_of(2), SPLIT)


# --- wrong payers -----------------------------------------------------------------------------------------------------


def two_products():
    """loss = sum(exp(x @ w) @ u) and its backward. exp(x @ w) is read in forward and, twice, in backward; u in both."""
    b = Builder()
    x, w, u = b.input((8, 4)), b.input((4, 6), "parameter"), b.input((6, 4), "parameter")
    e = b.call(aten.exp.default, V(b.call(aten.mm.default, V(x), V(w))))
    loss = b.call(aten.sum.dim_IntList, V(b.call(aten.mm.default, V(e), V(u))), [0, 1])
    b.backward = True
    tangent = b.input((8, 4), "tangent")
    of_u = b.call(aten.mm.default, V(b.call(aten.permute.default, V(e), [1, 0])), V(tangent))
    of_e = b.call(aten.mm.default, V(tangent), V(b.call(aten.permute.default, V(u), [1, 0])))
    of_y = b.call(aten.mul.Tensor, V(of_e), V(e))
    of_w = b.call(aten.mm.default, V(b.call(aten.permute.default, V(x), [1, 0])), V(of_y))
    return replace(b.finish([loss, (of_w, w), (of_u, u)]), saved=frozenset({e}))


LATENT = Prices(latency=(5.0,))
DATA_PARALLEL = {
    "op_0": (("S(0)", "R"), ("S(0)",)), "op_1": (("S(0)",), ("S(0)",)), "op_2": (("S(0)", "R"), ("P",)),
    "op_5": (("S(0)", "S(0)"), ("P",)), "op_7": (("R", "S(0)"), ("S(0)",)), "op_8": (("S(0)", "S(0)"), ("S(0)",)),
    "op_10": (("S(0)", "S(0)"), ("P",)), "kept:value_4": (("R",), ("R",)), "shared:value_4": (("S(0)",), ("S(0)",)),
    "shared:tangent_7": (("S(0)",), ("S(0)",)),
}
DEEP = {"net.layers.*:op_1": (("S(0)", "R"), ("S(0)",)), "net.layers.*:op_3": (("S(0)", "R"), ("S(0)",))}
"""The batch is split, parameters are gathered where they are read; what forward keeps of exp(x @ w), it gathers first."""


def fixed(graph):
    """Nothing left to choose, so that a wrong price cannot be avoided."""
    return {"stored": {v.name: ((0, 0),) for v in graph.values if v.kind == "parameter"},
            "pinned": DEEP if any(op.block for op in graph.operations) else DATA_PARALLEL}


EDGE, ARCS, FAN_OUT, COPY = ProblemEdges._edge, ProblemEdges._arcs_between, ProblemEdges._fan_out, ProblemEntities.add_copy


def copy_is_paid_by_every_reader(self, source, target, value):
    number = EDGE(self, source, target, value)
    if self.entities.drafts[target[0]].kind in ("kept", "shared"):
        self._counts[number] += len(value.users) - 1
    return number


def only_one_of_a_class_pays(self, source, target, value):
    number = EDGE(self, source, target, value)
    self._counts[number] = 1
    return number


def gradient_shares_its_collective_with_none(self, source, target, value):
    bucket_bytes, self.bucket_bytes = self.bucket_bytes, 0.0
    self._arcs.clear()
    found = ARCS(self, source, target, value)
    self.bucket_bytes = bucket_bytes
    return found


def everything_shares_a_collective(self, source, target, value):
    draft = self.entities.drafts[target[0]]
    kind = draft.kind
    draft.kind = "parameter"
    found = ARCS(self, source, target, value)
    draft.kind = kind
    return found


def copy_takes_no_bytes(self, role, source, readers, value, held, weight=False):
    return COPY(self, role, source, readers, value, False, weight)


def every_copy_takes_bytes(self, role, source, readers, value, held, weight=False):
    return COPY(self, role, source, readers, value, True, weight)


def nobody_shares(self, value, source, made, ends):
    self._arrive(value, source, (), ends)


def backward_starts_where_forward_did(self, value, source, made, ends):
    FAN_OUT(self, value, source, made, [end for end in ends if end.phase == FORWARD])
    FAN_OUT(self, value, source, BACKWARD, [end for end in ends if end.phase == BACKWARD])


def parameters_are_kept_whole(self, value, source, made, ends):
    sharded, self.sharded = self.sharded, self.sharded | {value.name}
    FAN_OUT(self, value, source, made, ends)
    self.sharded = sharded


@pytest.mark.parametrize(("room", "name", "mutant", "graph"), [
    (ProblemEdges, "_edge", copy_is_paid_by_every_reader, two_products),
    (ProblemEdges, "_edge", only_one_of_a_class_pays, deep),
    (ProblemEdges, "_arcs_between", gradient_shares_its_collective_with_none, two_products),
    (ProblemEdges, "_arcs_between", everything_shares_a_collective, two_products),
    (ProblemEdges, "_fan_out", nobody_shares, two_products),
    (ProblemEdges, "_fan_out", parameters_are_kept_whole, two_products),
    (ProblemEdges, "_fan_out", backward_starts_where_forward_did, two_products),
    (ProblemEntities, "add_copy", copy_takes_no_bytes, two_products),
    (ProblemEntities, "add_copy", every_copy_takes_bytes, two_products),
])
def test_a_wrong_payer_is_found_out(monkeypatch, room, name, mutant, graph):
    solve_on_mesh(graph(), axes_of(2), LATENT, **fixed(graph()))
    monkeypatch.setattr(room, name, mutant)
    with pytest.raises(VerificationError):
        solve_on_mesh(graph(), axes_of(2), LATENT, **fixed(graph()))


def test_one_edge_that_is_counted_once_too_often_is_found_out(tampering):
    graph = two_products()
    answer = solve_on_mesh(graph, axes_of(2), LATENT, **fixed(graph))
    taken = [k for k, path in enumerate(answer.solution.paths) if path]
    assert len(taken) > 6
    for k in taken:
        tampering(lambda p, k=k: replace(p, edges=one_more(p.edges, k)))
        with pytest.raises(VerificationError, match="objective"):
            solve_on_mesh(graph, axes_of(2), LATENT, **fixed(graph))

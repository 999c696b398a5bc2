"""A placement graph and axes -> an answer that fits, or an error with the reason."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost_model.cost_terms import SLICE
from passes.errors import BadInput, Infeasible
from passes.graph.placement_graph import PlacementGraph
from passes.graph.step_phase import FORWARD
from passes.hardware.axis import Axis, device_axes
from passes.sharding.formulation.decision_decoder import pins
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.sharding.grouping.op_groups import groups_of
from passes.sharding.oracle.memory_model import MemoryModel
from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.sharding.strategies.axis_pins import axis_rule
from passes.solver.solvers import SolverOptions
from tests.helpers.axes import axes_of
from tests.passes.graphs import Builder, Prices, V, aten
from tests.passes.sharding.exhaustive import Game
from tests.passes.sharding.formulation.test_placement_problem import training_step
from tests.passes.sharding.grouping.test_group_symmetry import layers
from tests.passes.sharding.random_graphs import graphs

SPLIT = Prices(us_per_flop=10.0)
SLOW_LINKS = Prices(latency=(1e5, 1e5), us_per_flop=0.01)


def placed(graph, axes=None, prices=SPLIT, **options) -> MeshPlacement:
    answer = solve_on_mesh(graph, device_axes(axes or {"x": 2}), prices, **options)
    assert isinstance(answer, MeshPlacement)
    return answer


def test_dear_work_is_split_and_dear_links_are_not_used():
    graph, _ = training_step()
    split = placed(graph)
    assert all(any(p != ("R",) for p in rows.inputs) for i, rows in split.decision.operations.items()
               if graph.operations[i].heavy)
    whole = placed(graph, prices=SLOW_LINKS)
    assert whole.cost.communication < 1e5
    assert split.solution.status == whole.solution.status == "optimal"
    assert split.solution.bound == pytest.approx(split.solution.cost, rel=1e-3)


def test_a_budget_is_met_and_costs_time():
    graph, _ = training_step()
    free = placed(graph, prices=SLOW_LINKS, stored=None)
    tight = placed(graph, prices=SLOW_LINKS, budget_bytes=free.cost.held_bytes - 1)
    assert tight.cost.held_bytes < free.cost.held_bytes
    assert tight.cost.step > free.cost.step


def test_with_two_moments_saved_values_and_gradients_do_not_add_up():
    graph, _ = training_step()
    ends = MemoryModel(1.0)
    free = placed(graph, prices=SLOW_LINKS)
    budget = max(ends.of(free.cost))
    assert budget < free.cost.held_bytes
    assert placed(graph, prices=SLOW_LINKS, budget_bytes=budget, lifetimes=ends).cost.step == free.cost.step
    assert placed(graph, prices=SLOW_LINKS, budget_bytes=budget).cost.step > free.cost.step
    tight = placed(graph, prices=SLOW_LINKS, budget_bytes=budget - 1, lifetimes=ends)
    assert max(ends.of(tight.cost)) < budget and tight.cost.step > free.cost.step


def test_a_budget_that_nobody_meets_names_the_smallest_that_works():
    graph, _ = training_step()
    with pytest.raises(Infeasible) as error:
        solve_on_mesh(graph, axes_of(2), SPLIT, budget_bytes=1.0)
    smallest = error.value.smallest_budget_bytes
    assert placed(graph, budget_bytes=smallest).cost.held_bytes == smallest
    with pytest.raises(Infeasible, match="smallest that works"):
        solve_on_mesh(graph, axes_of(2), SPLIT, budget_bytes=smallest - 1)


def test_a_cutoff_below_the_optimum_gives_no_answer():
    graph, _ = training_step()
    best = placed(graph).solution.cost
    nothing = solve_on_mesh(graph, axes_of(2), SPLIT, cutoff=best * 0.5)
    assert not isinstance(nothing, MeshPlacement) and nothing.status == "no_solution" and nothing.bound > best * 0.5
    assert placed(graph, cutoff=best * 2).solution.cost == pytest.approx(best)


def test_pins_of_one_answer_give_it_again():
    graph, _ = training_step()
    first = placed(graph, {"x": 2, "y": 2})
    again = placed(graph, {"x": 2, "y": 2}, pinned=pins(first.problem, first.solution))
    assert again.decision == first.decision and again.cost == first.cost
    with pytest.raises(BadInput):
        solve_on_mesh(graph, axes_of(2), SPLIT, pinned=pins(first.problem, first.solution))


def test_axes_of_one_rank_change_nothing():
    graph, _ = training_step()
    one = placed(graph, {"x": 1})
    assert one.cost.communication <= 0.1 and one.cost.compute == pytest.approx(
        placed(graph, {"x": 1, "y": 1}).cost.compute)
    assert placed(graph).cost.step < one.cost.step


@settings(max_examples=100, deadline=None)
@given(graphs(most=6), st.sampled_from([2, 3, 4]), st.sampled_from([0.001, 0.05, 1.0]), st.sampled_from([0.0, 2.0, 20.0]))
def test_nothing_is_cheaper_than_what_is_placed(graph, size, per_byte, latency):
    """But for slices, as in `test_build.compare`. `solve_on_mesh` itself recomputes the cost of its answer."""
    prices = Prices(latency=(latency,), us_per_byte=(per_byte,))
    found = placed(graph, {"x": size}, prices, options=SolverOptions(gap=0.0))
    best = Game(graph, (size,), prices, found.problem.groups).optimum()
    slack = 2 * len(found.problem.problem.edges) * SLICE
    assert best * (1 - 1e-9) - 1e-9 <= found.cost.step <= best * (1 + 1e-6) + slack


def test_what_one_axis_alone_could_split_is_left_whole_on_two():
    # Two elements on four ranks: each axis may split them, not both. That one is cheaper than none on each axis must
    # not leave only choices that split on both or read partial sums.
    b = Builder()
    x = b.call(aten.relu.default, V(b.input((2,))), ruled=False)
    b.call(aten.neg.default, V(x))  # nobody reads it: any placement will do
    answer = placed(b.finish([x]), {"x": 2, "y": 2})
    assert answer.decision.operations[1].inputs in ((("R", "R"),), ((((0, 0), "R")),), (("R", (0, 0)),))


# --- pinned axes ------------------------------------------------------------------------------------------------------


def splits(answer: MeshPlacement, axis: int) -> dict[str, set]:
    """Operator -> placements that its operands and results have on an axis."""
    graph = answer.problem.graph
    found: dict[str, set] = {}
    for index, rows in answer.decision.operations.items():
        op = graph.operations[index]
        for v, layout in zip((*op.inputs, *op.outputs), rows.inputs + rows.made):
            if isinstance(layout[axis], tuple):
                found.setdefault(op.kind, set()).add(layout[axis] in graph.values[v].batch)
    return found


@pytest.mark.parametrize(("axes", "rows"), [({"dp": 2}, {0: True}), ({"tp": 2}, {0: False}),
                                            ({"dp": 2, "tp": 2}, {0: True, 1: False}),
                                            ({"tp": 2, "dp": 2}, {0: False, 1: True})])
def test_dp_splits_rows_and_tp_anything_else(axes, rows):
    graph, _ = training_step()
    for prices in (SPLIT, SLOW_LINKS):  # whatever that costs
        answer = placed(graph, axes, prices)
        for axis, wanted in rows.items():
            found = splits(answer, axis)
            assert found["matmul"] == {wanted}
            assert all(kinds <= {wanted} for kinds in found.values())


def test_axes_of_other_names_are_free_and_products_that_cannot_be_split_stay_whole():
    graph, _ = training_step()
    rule = axis_rule(Axis("x", 2), graph)
    assert all(rule(op, s) for op in graph.operations for s in op.strategies)
    whole = [op.strategies[0] for op in graph.operations if op.kind == "matmul"]
    for size, stays_whole in ((2, False), (3, True), (8, False)):  # of 8 rows
        rule = axis_rule(Axis("dp", size), graph)
        products = [op for op in graph.operations if op.kind == "matmul"]
        assert [rule(op, s) for op, s in zip(products, whole)] == [stays_whole] * 2


def test_a_pinned_axis_never_makes_an_answer_cheaper():
    graph, _ = training_step()
    free = placed(graph, options=SolverOptions(gap=0.0)).cost.step
    for name in ("dp", "tp"):
        assert placed(graph, {name: 2}, options=SolverOptions(gap=0.0)).cost.step >= free * (1 - 1e-9)


def sequences() -> PlacementGraph:
    """Two linear layers on few wide weights and long sequences, so that splitting those would be cheapest."""
    b = Builder()
    x, v, w = b.input((2, 64, 4)), b.input((4, 4), "parameter"), b.input((4, 4), "parameter")
    flat = b.call(aten.view.default, V(x), [128, 4])
    y = b.call(aten.mm.default, V(b.call(aten.mm.default, V(flat), V(v))), V(b.call(aten.t.default, V(w))))
    b.backward = True
    tangent = b.input((128, 4), "tangent")
    g = b.call(aten.mm.default, V(b.call(aten.t.default, V(flat))), V(tangent))
    return b.finish([y, (b.call(aten.add.Tensor, V(g), V(g)), v)])


def test_tp_splits_weights_and_their_gradients_even_where_sequences_would_be_cheaper():
    graph = sequences()
    by_name = placed(graph, {"tp": 2})
    for index, rows in by_name.decision.operations.items():
        op = graph.operations[index]
        if op.kind == "matmul" and op.phase == FORWARD:
            assert isinstance(rows.inputs[1][0], tuple)
        elif op.kind == "matmul":
            assert isinstance(rows.made[0][0], tuple)
    free = placed(graph, {"x": 2})
    assert {rows.inputs[1] for i, rows in free.decision.operations.items()
            if graph.operations[i].kind == "matmul" and graph.operations[i].phase == FORWARD} == {("R",)}


def gram() -> tuple[Builder, int]:
    """x^T x in backward: rows of x^T are columns of x, so that a split of rows reads x in two ways."""
    b = Builder(backward=True)
    x = b.input((4, 6))
    return b, b.call(aten.mm.default, V(b.call(aten.permute.default, V(x), [1, 0])), V(x))


def squared_gradient() -> tuple[Builder, int]:
    """Partial sums on an axis that splits the batch, which cannot be squared before they are added."""
    b = Builder(backward=True)
    x, tangent = b.input((8, 6)), b.input((8, 8), "tangent")
    gradient = b.call(aten.mm.default, V(b.call(aten.permute.default, V(x), [1, 0])), V(tangent))
    return b, b.call(aten.mul.Tensor, V(gradient), V(gradient))


@pytest.mark.parametrize(("build", "name", "groups"), [(gram, "tp", 1), (squared_gradient, "dp", 2)])
def test_a_pinned_axis_leaves_a_choice_to_operations_that_do_not_go_together(build, name, groups):
    """One group, of which no choice is left, is taken apart; two have never been together."""
    b, y = build()
    graph = b.finish([y])
    assert len(groups_of(graph)) == groups
    for axes in ({name: 2}, {name: 2, "x": 2}):
        answer = placed(graph, axes)
        assert sorted(i for c in answer.problem.groups for i in c.operations) == list(range(len(graph.operations)))
        product = answer.decision.operations[1]
        assert any(isinstance(p[0], tuple) for p in product.inputs), "the pin holds"


@settings(max_examples=60, deadline=None)
@given(graphs(most=6), st.sampled_from([{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "x": 3}]))
def test_pinned_axes_always_leave_an_answer(graph, axes):
    placed(graph, axes)


# --- depth ------------------------------------------------------------------------------------------------------------


def deep(count, **options):
    b = layers(count, **options)
    return b.finish([len(b.values) - 1])


def between_others(count):
    """Layers of three kinds: the first one, the last one, and those between, each of which reads the one before it. Of three
    layers a single one is between others, and none of these reads another."""
    b = Builder()
    x = b.input((8, 4))
    for k in range(count):
        b.block = f"net.layers.{k}"
        if k in (0, count - 1):
            x = b.call(aten.tanh.default, V(x))
        x = b.call(aten.mm.default, V(x), V(b.input((4, 4), "parameter")))
        if k in (0, count - 1):
            x = b.call(aten.exp.default, V(x))
    return b.finish([x])


def trained(count):
    """A training step of x = exp(x @ w), `count` times, whose gradients are much smaller than a bucket: reduced together, they
    pay one latency, of which each pays less in a deeper model."""
    b = Builder()
    x, steps = b.input((64, 4)), list[tuple[str, int, int, int]]()
    for k in range(count):
        b.block = f"net.layers.{k}"
        w = b.input((4, 4), "parameter")
        made = b.call(aten.exp.default, V(b.call(aten.mm.default, V(x), V(w))))
        steps.append((b.block, x, w, made))
        x = made
    b.backward, b.block, gradients = True, "", list[tuple[int, int]]()
    d = b.input((64, 4), "tangent")
    for block, read, w, made in reversed(steps):
        b.block = block
        d = b.call(aten.mul.Tensor, V(d), V(made))
        gradients.append((b.call(aten.mm.default, V(b.call(aten.permute.default, V(read), [1, 0])), V(d)), w))
        d = b.call(aten.mm.default, V(d), V(b.call(aten.permute.default, V(w), [1, 0])))
    return b.finish([x, *gradients])


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 2, "y": 2}])
@pytest.mark.parametrize("deep", [deep, between_others, trained])
def test_two_depths_give_the_answer_for_any(deep, axes):
    long = placed(deep(4), axes, shorter=deep(3), further=5)
    real = placed(deep(9), axes)
    assert long.cost.step == pytest.approx(real.cost.step, rel=1e-9)
    assert long.cost.held_bytes == pytest.approx(real.cost.held_bytes)
    assert sorted(e.multiplicity for e in long.solved.entities) == sorted(
        e.multiplicity for e in real.problem.problem.entities)


def test_depths_that_do_not_correspond_are_refused():
    with pytest.raises(DepthsDiffer):
        solve_on_mesh(deep(4, widths=[16, 16, 16, 32]), axes_of(2), SPLIT, shorter=deep(3), further=2)
    with pytest.raises(DepthsDiffer):
        solve_on_mesh(deep(3), axes_of(2), SPLIT, shorter=deep(4), further=2)


def test_what_was_chosen_for_any_depth_can_be_pinned():
    first = placed(deep(4), {"x": 2, "y": 2}, shorter=deep(3), further=5)
    taken = pins(first.problem, first.solution)
    again = placed(deep(4), {"x": 2, "y": 2}, shorter=deep(3), further=5, pinned=taken)
    assert all(len(entity.choices) == 1 for entity in again.solved.entities) and again.solution.variables == 0
    assert again.decision == first.decision and again.cost == first.cost


def test_what_has_no_rule_is_left_whole_and_everything_around_it_still_planned():
    b = Builder()
    x = b.call(aten.mm.default, V(b.input((8, 4))), V(b.input((4, 8), "parameter")))
    odd = b.call(aten.exp.default, V(x), ruled=False)
    y = b.call(aten.mm.default, V(odd), V(b.input((8, 4), "parameter")))
    graph = b.finish([y])
    answer = placed(graph, prices=Prices(us_per_flop=100.0))
    rows = answer.decision.operations
    assert rows[1].inputs == rows[1].outputs == (("R",),)
    assert rows[0].made != (("R",),) != rows[2].inputs[0]

"""Models whose best placement is known before -> that one is chosen after, for no more than hand-made plans cost."""
from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.step_phase import BACKWARD
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import enumerate_meshes, mesh_from_pin
from passes.sharding.oracle.comm_attribution import CommAttribution
from passes.sharding.pricing.redistribution import collective
from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.solver.solvers import SolverOptions
from tests.passes.traced import annotated_joint, fake, mlp, transformer

EXACT = SolverOptions(gap=0.0)
STATE = 4  # AdamW: parameter, gradient, two states


def traced(model, *batch) -> AnalyzedGraph:
    return annotated_joint(model, *batch)


def planned(model: AnalyzedGraph, axes: dict[str, int], cluster: str, **options) -> MeshPlacement:
    mesh = mesh_from_pin(axes, Cluster.parse(cluster))
    answer = solve_on_mesh(model.graph, mesh.layout_axes, MeshPrices(mesh, 2), options=EXACT, **options)
    assert isinstance(answer, MeshPlacement)
    return answer


def stored(model: AnalyzedGraph, answer: MeshPlacement) -> dict[str, tuple]:
    """Parameter -> where it is stored."""
    names = model.interface.names
    return {names[v.name]: answer.decision.inputs[v.index] for v in model.graph.values if v.kind == "parameter"}


def everywhere(model: AnalyzedGraph, layout: tuple) -> dict[str, tuple]:
    """The `stored=` of a hand-made plan."""
    return {v.name: layout for v in model.graph.values if v.kind == "parameter"}


def products(answer: MeshPlacement, backward: bool, axis: int = 0) -> list[tuple]:
    """(left operand, right operand, result, is the result split by rows of the batch) of every matrix product."""
    found = []
    for index, rows in answer.decision.operations.items():
        op = answer.problem.graph.operations[index]
        if op.kind == "matmul" and (op.phase == BACKWARD) == backward:
            made = rows.made[0][axis]
            found.append((rows.inputs[0][axis], rows.inputs[1][axis], made,
                          made in answer.problem.graph.values[op.outputs[0]].batch))
    return found


def collectives(answer: MeshPlacement) -> Counter:
    """(collective, axis, in backward, shape of the value) -> how often; each shared way counts once."""
    found: Counter = Counter()
    problem = answer.problem
    for leg in CommAttribution(problem.graph, problem.groups, problem.saved, answer.decision).legs:
        layout = leg.route.layout(leg.start)
        for hop in leg.route.hops[leg.start:leg.stop]:
            (axis,) = [a for a, (p, q) in enumerate(zip(layout, hop.layout)) if p != q]
            kind = collective(layout[axis], hop.layout[axis])
            if kind != "slice":
                found[kind, axis, hop.phase == BACKWARD, answer.problem.graph.values[leg.route.value].spec.shape] += 1
            layout = hop.layout
    return found


def gradients(answer: MeshPlacement) -> list[tuple]:
    """The collectives on the way of each gradient from where it is made to where its parameter is stored."""
    found = []
    for (_, parameter), route in zip(answer.problem.graph.outputs, answer.decision.outputs):
        if parameter is not None:
            layouts = [route.source, *(hop.layout for hop in route.hops)]
            found.append(tuple(collective(p[0], q[0]) for p, q in zip(layouts, layouts[1:])))
    return found


class TestWideMLPAndSmallBatch:
    """Two blocks of 4096 -> 16384 -> 4096, 8 rows, 4 devices: weights are large, activations small."""

    rows, width, hidden, cluster = 8, 4096, 16384, "1x4:a100-80g"

    @classmethod
    @functools.cache
    def model(cls):
        with fake():
            return traced(mlp(cls.width, cls.hidden), torch.empty(cls.rows, cls.width))

    @classmethod
    @functools.cache
    def answer(cls):
        return planned(cls.model(), {"x": 4}, cls.cluster)

    def test_the_first_weight_is_split_by_columns_and_the_second_by_rows(self):
        model, answer = self.model(), self.answer()
        columns, rows = ("R", (1, 0), (1, 0), False), ((1, 0), (0, 0), "P", False)  # of x @ up.T and h @ down.T
        assert products(answer, backward=False) == [columns, rows] * 2
        # stored as nn.Linear has them: (out, in)
        assert stored(model, answer) == {
            f"blocks.{k}.{name}.weight": place for k in (0, 1) for name, place in (("up", ((0, 0),)), ("down", ((1, 0),)))}

    def test_each_block_reduces_once_forward_and_once_backward(self):
        answer = self.answer()
        shape = (self.rows, self.width)
        assert collectives(answer) == {
            ("all_reduce", 0, False, shape): 2,
            ("all_reduce", 0, True, shape): 1,  # nobody wants the gradient of the first block's input
        }
        assert gradients(answer) == [()] * 4

    def test_it_costs_what_the_hand_made_plan_costs(self):
        answer = self.answer()
        prices = answer.problem.prices
        reduced = prices.collective("all_reduce", 0, self.rows * self.width * 4)
        assert answer.cost.communication == pytest.approx(3 * reduced)
        elements = 2 * 2 * self.width * self.hidden / 4
        assert answer.cost.optimizer == pytest.approx(prices.update(elements, "float32"))
        assert answer.cost.parameter_bytes == elements * 4

    def test_the_alternatives_are_dearer(self):
        model, answer = self.model(), self.answer()
        assert planned(model, {"tp": 4}, self.cluster).cost.step == pytest.approx(answer.cost.step)
        for axes, layout in (({"dp": 4}, None), ({"dp": 4}, ("R",)), ({"dp": 4}, ((0, 0),)), ({"tp": 4}, ("R",))):
            options = {} if layout is None else {"stored": everywhere(model, layout)}
            assert planned(model, axes, self.cluster, **options).cost.step > 1.5 * answer.cost.step


class TestSmallModelAndBigBatch:
    """Two blocks of 512 -> 2048 -> 512, 65536 rows, 4 devices: activations are large, weights small."""

    cluster = "1x4:a100-80g"

    @classmethod
    @functools.cache
    def model(cls):
        with fake():
            return traced(mlp(512, 2048), torch.empty(65536, 512))

    @classmethod
    @functools.cache
    def answer(cls):
        return planned(cls.model(), {"x": 4}, cls.cluster)

    def test_every_product_works_on_rows_of_the_batch(self):
        answer = self.answer()
        assert products(answer, backward=False) == [((0, 0), "R", (0, 0), True)] * 4
        weights = [p for p in products(answer, backward=True) if p[2] == "P"]
        others = [p for p in products(answer, backward=True) if p[2] != "P"]
        assert weights == [((1, 0), (0, 0), "P", False)] * 4 and others == [((0, 0), "R", (0, 0), True)] * 3

    def test_every_gradient_is_reduced_once_and_no_activation_moves(self):
        answer = self.answer()
        assert all(leg in (("all_reduce",), ("reduce_scatter",)) for leg in gradients(answer))
        moved = {shape for _, _, _, shape in collectives(answer)}
        assert moved <= {(2048, 512), (512, 2048), ()}  # weights and the loss

    def test_the_alternatives_are_no_cheaper(self):
        model, answer = self.model(), self.answer()
        assert planned(model, {"dp": 4}, self.cluster).cost.step == pytest.approx(answer.cost.step)
        for layout in (("R",), ((0, 0),), ((1, 0),)):
            by_hand = planned(model, {"dp": 4}, self.cluster, stored=everywhere(model, layout))
            assert answer.cost.step <= by_hand.cost.step * (1 + 1e-9)
        assert planned(model, {"tp": 4}, self.cluster).cost.step > 1.05 * answer.cost.step


class TestTransformerWhoseStateDoesNotFit:
    """16 rows of 512 tokens, 4 devices on slow links: whole parameters are the fastest, if only they fitted."""

    cluster = "4x1:a100-80g"

    @classmethod
    @functools.cache
    def model(cls):
        with fake():
            model, batch = transformer(vocabulary=4096, width=1024, heads=8, layers=2, rows=16, length=512)
            return traced(model, *batch)

    @classmethod
    @functools.cache
    def free(cls):
        return planned(cls.model(), {"x": 4}, cls.cluster)

    @classmethod
    @functools.cache
    def state(cls):
        """Bytes of parameters, gradients and optimizer state, whole."""
        return STATE * sum(v.bytes for v in cls.model().graph.values if v.kind == "parameter")

    def test_without_a_budget_parameters_are_whole(self):
        model, free, state = self.model(), self.free(), self.state()
        whole = [name for name, layout in stored(model, free).items() if layout == ("R",)]
        assert len(whole) >= 0.9 * len(stored(model, free))
        assert free.cost.held_bytes - free.cost.activation_bytes > 0.9 * state

    def test_with_a_budget_they_are_sharded_and_it_is_met(self):
        model, free, state = self.model(), self.free(), self.state()
        budget = 0.84 * state
        assert budget < free.cost.held_bytes
        tight = planned(model, {"x": 4}, self.cluster, budget_bytes=budget)
        assert tight.cost.held_bytes <= budget
        big = [v.name for v in model.graph.values if v.kind == "parameter" and v.bytes >= 1e6]
        names = [model.interface.names[name] for name in big]
        split = [name for name in names if stored(model, tight)[name] != ("R",)]
        assert len(split) >= 0.8 * len(names), stored(model, tight)
        assert free.cost.step <= tight.cost.step <= 1.5 * free.cost.step
        rows = {v.name: ((0, 0),) if v.spec.shape[0] % 4 == 0 and v.factors[0][0] % 4 == 0 else ((1, 0),)
                for v in model.graph.values if v.kind == "parameter" and len(v.spec.shape) > 1}
        for axes, by_hand in (({"dp": 4}, rows), ({"tp": 4}, rows), ({"dp": 4}, {}), ({"tp": 4}, {})):
            other = planned(model, axes, self.cluster, budget_bytes=budget, stored=by_hand)
            assert other.cost.held_bytes <= budget
            assert tight.cost.step <= other.cost.step * (1 + 1e-9)


class TestTwoAxes:
    """Blocks of 2048 -> 8192 -> 2048, 16384 rows, 2 nodes of 4 devices: fast links inside a node, slow ones between."""

    cluster = "2x4:a100-80g"

    @classmethod
    @functools.cache
    def model(cls):
        with fake():
            return traced(mlp(2048, 8192), torch.empty(16384, 2048))

    @classmethod
    @functools.cache
    def best(cls):
        """The cheapest answer over all meshes."""
        meshes = enumerate_meshes(Cluster.parse(cls.cluster))
        answers = [planned(cls.model(), dict(zip(m.names, m.shape)), cls.cluster) for m in meshes]
        return min(zip(meshes, answers), key=lambda pair: pair[1].cost.step)

    def test_data_between_nodes_and_tensor_inside_them(self):
        best = self.best()
        mesh, answer = best
        assert mesh.shape == (2, 4)
        assert [p[3] for p in products(answer, backward=False, axis=0)] == [True] * 4
        inside = [p[:3] for p in products(answer, backward=False, axis=1)]
        assert inside == [("R", (1, 0), (1, 0)), ((1, 0), (0, 0), "P")] * 2

    def test_only_gradients_and_the_loss_cross_nodes(self):
        best = self.best()
        crossing = {shape for _, axis, _, shape in collectives(best[1]) if axis == 0}
        assert (16384, 2048) not in crossing and (16384, 8192) not in crossing
        assert crossing <= {(2048, 8192), (8192, 2048), ()}

    def test_hand_made_plans_are_no_cheaper(self):
        model, best = self.model(), self.best()
        for axes in ({"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}, {"dp": 8}, {"tp": 8}, {"tp": 2, "dp": 4}):
            assert best[1].cost.step <= planned(model, axes, self.cluster).cost.step * (1 + 1e-9), axes
        assert planned(model, {"dp": 2, "tp": 4}, self.cluster).cost.step < 1.01 * best[1].cost.step

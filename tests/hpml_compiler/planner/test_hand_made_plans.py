"""Llama-3 8B on 64 H100 -> the plan costs at most what plans cost that people make by hand, under the same prices.

The plan is the one that `hpml plan` makes: from traces of three and four layers, over all meshes, within the memory of the
device, for 16 rows of 8192 tokens. It is made for the loss and the logits, which every rank gets whole, and for the loss
alone: gathering the logits burdens all plans, and the solver finds a way around it that the schemes do not have. With 64
rows, for the loss alone, DDP and FSDP have a row for every rank.

A hand-made plan is the same partition problem (same graphs, same prices, same state of the optimizer) on a mesh of the
scheme's own, with all choices taken away that the scheme does not make. What it leaves open the solver places, so each
scheme is at its best. The schemes by axis:

- *data*: as a pinned axis `dp`. Only the batch is split, and every matrix product, attention and look-up has to split it.
- *idle*: nothing is split; ranks along it repeat each other. 16 rows keep no more than 16 ranks busy.
- *sequence*: only the sequence, and around attention the heads (Ulysses), are split; products and look-ups have to
  split the sequence, attention the heads. What is left of a batch that is too small for all ranks goes here.
- *tensor* (Megatron): q, k, v, gate, up and the head are split by columns, o and down by rows, in the forward product
  and in both backward ones; attention by heads; the embedding by words. Batch and sequence stay whole, and so does the
  residual stream: between products it is replicated, or a sum not reduced yet.
- *tensor with sequence parallel*: the same products, but between them the residual stream is split by sequence.
  The loss is left open.

The schemes, with where parameters, gradients and optimizer state are stored:

- DDP: data (idle or sequence where the batch runs out); everything whole on every rank.
- FSDP: the same; everything split over all ranks, along the dim from which gathering it is the cheapest.
- FSDP x TP: data x tensor with sequence parallel; as TP, and split over data along the cheapest dim.
- TP: tensor on all ranks, as one axis of 64 or as 8 x 8, or inside a node with the nodes idle; stored as used. 64 ranks
  cannot share 8 key-value heads: where heads do not divide (on the axis of 64, on the outer one of 8 x 8) the attention
  block is left open.

DDP without sequence, and TP without sequence (whose residual stream is whole on every device), do not fit; they are
compared without the budget. The others are compared both within the budget and without.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from hpml_compiler import api
from hpml_compiler.planner.search import placement_request
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.errors import Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.layouts import Layout, legal
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.hardware.axis import Axis
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.op_rules.base import PARTIAL, REPLICATE, Placement, Strategy
from passes.sharding.formulation.decision_decoder import decode
from passes.sharding.formulation.depth_extrapolation import extrapolate, extrapolate_cost, solution_of_shorter
from passes.sharding.formulation.placement_problem import MeshTables, PlacementProblem
from passes.sharding.oracle.cost_check import DecisionCost, recompute_cost
from passes.sharding.pricing.redistribution import cheapest_route, collective
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.strategies.axis_pins import axis_rule
from passes.sharding.strategies.mesh_strategies import AxisRule
from passes.solver.ilp_search import solve
from passes.solver.problem import Solution
from passes.solver.solvers import SolverOptions

pytestmark = pytest.mark.slow

CLUSTER = Cluster.parse("8x8:h100-80g")
GAP = 1e-3
LAYERS, HIDDEN, LENGTH = 32, 4096, 8192
PRODUCTS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1, "lm_head": 0}
"""Linear layer -> the dim of its weight (out, in) that tensor parallelism splits: 0 by columns, 1 by rows."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GROUPS = 8
HEADS = (1, 0)
"""Heads in (rows, heads, length, head dim); the first factor are the groups that share keys and values."""


class LossAlone(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).loss


@dataclass(frozen=True, eq=False)
class Model:
    """What the product planned, and the plan."""

    long: AnalyzedGraph
    short: AnalyzedGraph
    further: int
    plan: GraphPlan


@dataclass(frozen=True)
class HandMade:
    problem: PlacementProblem
    free: Solution
    """Without a budget."""
    fitting: Solution | None
    """Within the device's memory; None if nothing fits."""
    decision: Decision
    """Of `free`, as is `cost`."""
    cost: DecisionCost

    @property
    def graph(self) -> PlacementGraph:
        return self.problem.graph


def llama_8b(rows: int, logits: bool) -> tuple[nn.Module, dict[str, Any]]:
    config = T.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=GROUPS, vocab_size=128256, max_position_embeddings=LENGTH, use_cache=False, dtype="bfloat16")
    with torch.device("meta"):
        model = T.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    return model if logits else LossAlone(model), dict(input_ids=ids, labels=ids, use_cache=False)


@functools.cache
def planned(rows: int, logits: bool) -> Model:
    """The product's plan, made once, and the graphs that it was made from."""
    seen: dict[str, Any] = {}
    plan_graph = placement_request.plan_graph

    def listen(annotated: AnalyzedGraph, *args, **options) -> PlanResult:
        seen.update(options, long=annotated)
        return plan_graph(annotated, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement_request, "plan_graph", listen)
        plan = api.plan(*llama_8b(rows, logits), "8x8:h100-80g", gap=GAP)
    (graph,) = plan.graphs
    short = copy.copy(seen["long"])
    short.graph = seen["shorter"]
    return Model(seen["long"], short, seen["further"], graph)


# --- what the schemes fix ---------------------------------------------------------------------------------------------


def placed(op: Operation, strategy: Strategy, graph: PlacementGraph) -> Iterator[tuple[Value, Placement]]:
    """The tensors of an operation, with their placements."""
    yield from zip((graph.values[v] for v in (*op.inputs, *op.outputs)), (*strategy.inputs, *strategy.outputs))


def by_sequence(value: Value, placement: Placement) -> bool:
    return isinstance(placement, tuple) and value.factors[placement[0]][placement[1]] == LENGTH


def by_heads(op: Operation, strategy: Strategy) -> bool:
    return strategy.inputs[0] == HEADS


def is_residual(value: Value) -> bool:
    """Whether a value has the shape of the residual stream."""
    return len(value.spec.shape) == 3 and value.factors[1:] == ((LENGTH,), (HIDDEN,))


def is_look_up(op: Operation) -> bool:
    """Whether it reads an embedding or adds up its gradient, which up to torch 2.12 is written as `index_put`."""
    return op.kind == "embedding" or op.target == "aten.index_put.default"


def data(model: AnalyzedGraph, size: int) -> AxisRule:
    rule = axis_rule(Axis("dp", size), model.graph)
    return lambda op, s: rule(op, s) and (not is_look_up(op) or s.splits)


def idle(model: AnalyzedGraph, size: int) -> AxisRule:
    return lambda op, s: {*s.inputs, *s.outputs} <= {REPLICATE}


def sequence(model: AnalyzedGraph, size: int) -> AxisRule:
    graph = model.graph

    def allowed(op: Operation, s: Strategy) -> bool:
        if op.kind == "attention":
            return by_heads(op, s)
        split = [(v, p) for v, p in placed(op, s, graph) if isinstance(p, tuple)]
        if op.kind == "matmul" or is_look_up(op):
            return any(by_sequence(v, p) for v, p in split)
        return all(by_sequence(v, p) or len(v.spec.shape) > 3 and p[0] in (1, 2) for v, p in split)

    return allowed


def tensor(model: AnalyzedGraph, size: int, *, sequence: bool = False, attention: bool = True) -> AxisRule:
    graph = model.graph
    attention = attention and GROUPS % size == 0
    wanted = tensor_products(model, attention)
    between = {PARTIAL} if sequence else {PARTIAL, REPLICATE}

    def allowed(op: Operation, s: Strategy) -> bool:
        tensors = list(placed(op, s, graph))
        if any(p in v.batch for v, p in tensors):
            return False
        if op.index in wanted:
            position, placement = wanted[op.index]
            return tensors[position][1] == placement
        if op.kind == "attention" and attention:
            return by_heads(op, s)
        if op.kind == "embedding" and op.phase == FORWARD:
            return s.inputs[0] == (0, 0)
        if not sequence and any(by_sequence(v, p) for v, p in tensors):
            return False
        return op.kind != "pointwise" or all(
            p in between or sequence and by_sequence(v, p) for v, p in tensors if is_residual(v))

    return allowed


tensor_and_sequence = functools.partial(tensor, sequence=True)
tensor_but_attention = functools.partial(tensor, attention=False)


def parameter_layer(model: AnalyzedGraph, value: Value) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return model.interface.names[value.name].split(".")[-2]


def tensor_products(model: AnalyzedGraph, attention: bool) -> dict[int, tuple[int, Placement]]:
    """Matrix product -> position of its weight (or of the weight's gradient) among its tensors, and how that is split."""
    graph = model.graph
    found: dict[int, tuple[int, Placement]] = {}
    for value in graph.values:
        layer = parameter_layer(model, value) if value.kind == "parameter" else ""
        if layer not in PRODUCTS or layer in ATTENTION and not attention:
            continue
        split: Placement = (PRODUCTS[layer], 0)
        weights = {value.index: split}
        for op in graph.operations:
            mine = [k for k, v in enumerate(op.inputs) if v in weights]
            if mine and op.kind == "view":
                weights[op.outputs[0]] = through(op, 0, weights[op.inputs[0]])
            elif mine and op.kind == "matmul":
                found[op.index] = mine[0], weights[op.inputs[mine[0]]]
        (gradient,) = [v for v, p in graph.outputs if p == value.index]
        maker = graph.operations[graph.values[gradient].producer]
        while maker.kind == "view":
            split = through(maker, 1, split)
            maker = graph.operations[graph.values[maker.inputs[0]].producer]
        assert maker.kind == "matmul", maker.name
        found[maker.index] = len(maker.inputs), split
    return found


def through(op: Operation, known: int, split: Placement) -> Placement:
    """The split at the other end of a view. known: 0 for what it reads, 1 for what it makes."""
    ends = [(s.inputs[0], s.outputs[0]) for s in op.strategies]
    (other,) = [pair[1 - known] for pair in ends if pair[known] == split]
    return other


def whole(model: AnalyzedGraph, sizes: tuple[int, ...], axes: tuple[Callable, ...]) -> dict[str, Layout]:
    return {v.name: (REPLICATE,) * len(sizes) for v in model.graph.values if v.kind == "parameter"}


def as_used(model: AnalyzedGraph, value: Value, size: int, axis: Callable) -> Placement | None:
    """Where the scheme of an axis has a parameter when it is used; None leaves it open."""
    if axis in (data, idle, sequence) or len(value.spec.shape) < 2:
        return REPLICATE
    layer = parameter_layer(model, value)
    if layer in ATTENTION and (axis is tensor_but_attention or GROUPS % size):
        return None
    return PRODUCTS.get(layer, 0), 0


def used(model: AnalyzedGraph, sizes: tuple[int, ...], axes: tuple[Callable, ...]) -> dict[str, Layout]:
    """Every parameter where its products want it; those that an axis leaves open are not named."""
    found = {}
    for value in model.graph.values:
        if value.kind == "parameter":
            layout = tuple(as_used(model, value, n, axis) for n, axis in zip(sizes, axes))
            if None not in layout:
                found[value.name] = layout
    return found


def sharded(model: AnalyzedGraph, sizes: tuple[int, ...], axes: tuple[Callable, ...]) -> dict[str, Layout]:
    """Every parameter split on every axis, along the dims from which it comes cheapest to where it is used."""
    prices = MeshPrices(mesh_from_pin(dict(zip("xy", sizes)), CLUSTER), 2)
    found, over = {}, prices.mesh.layout_axes
    wanted = used(model, sizes, axes)
    for value in model.graph.values:
        if value.kind == "parameter":
            target = wanted[value.name]
            dims = [(d, k) for d, factors in enumerate(value.factors) for k in range(len(factors))]
            layouts = itertools.product(*([p] if isinstance(p, tuple) else dims for p in target))
            routes = ((cheapest_route(value, x, target, over, prices), x) for x in layouts if legal(value, x, over))
            found[value.name] = min((route[0], x) for route, x in routes if route is not None)[1]
    return found


@dataclass(frozen=True)
class Scheme:
    sizes: tuple[int, ...]
    axes: tuple[Callable, ...]
    stored: Callable
    fits: bool = True


SCHEMES = {
    "DDP": Scheme((16, 4), (data, idle), whole, fits=False),
    "DDP, sequence": Scheme((16, 4), (data, sequence), whole),
    "FSDP": Scheme((16, 4), (data, idle), sharded),
    "FSDP, sequence": Scheme((16, 4), (data, sequence), sharded),
    "FSDP x TP, 8x8": Scheme((8, 8), (data, tensor_and_sequence), sharded),
    "FSDP x TP, 16x4": Scheme((16, 4), (data, tensor_and_sequence), sharded),
    "TP inside a node": Scheme((8, 8), (idle, tensor), used, fits=False),
    "TP, 8x8": Scheme((8, 8), (tensor_but_attention, tensor), used, fits=False),
    "TP, 64": Scheme((64,), (tensor,), used, fits=False),
}
A_ROW_FOR_EVERY_RANK = {
    "DDP": Scheme((64,), (data,), whole, fits=False),
    "FSDP": Scheme((64,), (data,), sharded),
    "FSDP x TP, 8x8": Scheme((8, 8), (data, tensor_and_sequence), sharded),
    "FSDP x TP, 16x4": Scheme((16, 4), (data, tensor_and_sequence), sharded),
}


@functools.cache
def by_hand(model: Model, scheme: Scheme) -> HandMade:
    sizes = scheme.sizes
    prices = MeshPrices(mesh_from_pin(dict(zip("xy", sizes)), CLUSTER), 2)
    memo = MeshTables()
    long, short = (
        PlacementProblem(
            each.graph, prices.mesh.layout_axes, prices, rules=[axis(each, n) for axis, n in zip(scheme.axes, sizes)],
            state=TrainingStateModel(), stored=scheme.stored(each, sizes, scheme.axes), memo=memo)
        for each in (model.long, model.short)
    )
    problem = extrapolate(long, short, model.further)
    options = SolverOptions(gap=GAP, time_limit_s=30)
    free = solve(problem, options)
    fitting: Solution | None = None
    with contextlib.suppress(Infeasible):
        fitting = solve(replace(problem, budget_bytes=float(CLUSTER.device.memory_bytes)), options)
    return HandMade(long, free, fitting, decode(long, free), repriced(long, short, free, model.further))


def repriced(long: PlacementProblem, short: PlacementProblem, solution: Solution, further: int) -> DecisionCost:
    """The cost recomputed operation by operation, as for the product's own plans."""
    costs = []
    for problem, own in ((long, solution), (short, solution_of_shorter(long, short, solution))):
        decision = decode(problem, own)
        costs.append(recompute_cost(problem.graph, problem.groups, problem.saved, decision, problem.prices, problem.state,
                                    problem.bucket_bytes))
    return extrapolate_cost(costs[0], costs[1], further)


CASES = {"loss and logits": (16, True), "loss": (16, False), "loss, 64 rows": (64, False)}


def schemes(rows: int) -> dict[str, Scheme]:
    return SCHEMES if rows == 16 else A_ROW_FOR_EVERY_RANK


@pytest.fixture(params=[(case, name) for case, (rows, _) in CASES.items() for name in schemes(rows)],
                ids=lambda param: ": ".join(param))
def pair(request) -> tuple[Model, Scheme, HandMade]:
    case, name = request.param
    scheme = schemes(CASES[case][0])[name]
    model = planned(*CASES[case])
    return model, scheme, by_hand(model, scheme)


def test_the_chosen_plan_is_at_most_as_costly(pair):
    model, scheme, hand = pair
    solver = model.plan.solver
    assert solver.status == "optimal" and solver.gap <= GAP
    assert model.plan.memory.parameters + model.plan.memory.gradients + model.plan.memory.optimizer + (
        model.plan.memory.activations) <= CLUSTER.device.memory_bytes
    assert (hand.fitting is not None) == scheme.fits
    for solution in (hand.fitting, hand.free) if hand.fitting else (hand.free,):
        assert solution.status == "optimal"
        assert solver.cost <= solution.cost * (1 + GAP)


def test_the_hand_made_plan_costs_what_its_operations_cost(pair):
    _, _, hand = pair
    assert hand.cost.step == pytest.approx(hand.free.cost, rel=1e-9)
    assert hand.cost.held_bytes == pytest.approx(hand.free.held_bytes[0], rel=1e-9)


COLUMNS, ROWS = ("R", (1, 0), (1, 0)), ((1, 0), (0, 0), PARTIAL)
COLUMNS_GRADIENT, ROWS_GRADIENT = ((0, 0), "R", (0, 0)), ("R", (1, 0), (1, 0))


def forward_and_backward(hand: HandMade, axis: int) -> tuple[Counter, Counter]:
    """(left operand, right operand, result) of the matrix products on one axis, and how many there are."""
    found: tuple[Counter, Counter] = (Counter(), Counter())
    for op in hand.graph.operations:
        if op.kind == "matmul":
            rows = hand.decision.operations[op.index]
            found[op.phase == BACKWARD][(*(p[axis] for p in rows.inputs), rows.made[0][axis])] += 1
    return found


def traced_layers(hand: HandMade) -> int:
    return len({op.block for op in hand.graph.operations if op.kind == "attention"})


def test_every_axis_does_what_the_scheme_says(pair):
    """q, k, v, gate, up and the head by columns, o and down by rows; attention by heads; all the rest by rows of tokens."""
    _, scheme, hand = pair
    layers = traced_layers(hand)
    for axis, kind in enumerate(scheme.axes):
        forward, backward = forward_and_backward(hand, axis)
        attention = {hand.decision.operations[op.index].inputs[0][axis]
                     for op in hand.graph.operations if op.kind == "attention"}
        if kind in (data, sequence):
            tokens = (0, 0) if kind is data else (0, 1)
            assert forward == {(tokens, "R", tokens): 7 * layers + 1}
            assert backward == {
                (tokens, "R", tokens): 7 * layers + 1, ((1, tokens[1]), tokens, PARTIAL): 7 * layers + 1}
            assert attention == ({(0, 0)} if kind is data else {HEADS})
        elif kind is idle:
            assert set(forward) == set(backward) == {("R", "R", "R")} and attention == {"R"}
        elif kind is tensor_but_attention or GROUPS % scheme.sizes[axis]:
            assert forward[COLUMNS] >= 2 * layers + 1 and forward[ROWS] >= layers
        else:
            assert forward == {COLUMNS: 5 * layers + 1, ROWS: 2 * layers}
            assert backward == Counter({ROWS: 5 * layers + 1, COLUMNS_GRADIENT: 5 * layers + 1}) + Counter(
                {COLUMNS: 2 * layers}) + Counter({ROWS_GRADIENT: 2 * layers})
            assert attention == {HEADS}


def test_the_residual_stream_is_split_by_sequence_or_not_at_all(pair):
    _, scheme, hand = pair
    for axis, kind in enumerate(scheme.axes):
        if kind in (data, sequence):
            continue
        sums = [op for op in hand.graph.operations if "add.Tensor" in op.target and op.phase == FORWARD
                and op.block and is_residual(hand.graph.values[op.outputs[0]])]
        assert len(sums) == 2 * traced_layers(hand)
        between = {hand.decision.operations[op.index].outputs[0][axis] for op in sums}
        assert between == {(1, 0)} if kind is tensor_and_sequence else between <= {REPLICATE, PARTIAL}


def test_parameters_are_stored_and_gradients_reduced_as_the_scheme_says(pair):
    """What no route reduces was reduced where it was made: all weight gradients are made partial, as the products say.

    Where parameters are sharded, gradients of the small attention matrices may be reduced whole and then sliced: under
    these prices an all_reduce, which may go by trees, can be cheaper than a ring's reduce_scatter."""
    _, scheme, hand = pair
    for (_, parameter), route in zip(hand.graph.outputs, hand.decision.outputs):
        if parameter is None:
            continue
        layouts = [route.source, *(hop.layout for hop in route.hops)]
        reductions = {
            axis: collective(p[axis], q[axis]) for p, q in zip(layouts, layouts[1:]) for axis in range(len(p))
            if p[axis] == PARTIAL != q[axis]
        }
        stored = hand.decision.inputs[parameter]
        assert route.target == stored
        for axis, kind in enumerate(scheme.axes):
            if scheme.stored is whole:
                assert stored[axis] == REPLICATE
            elif scheme.stored is sharded:
                assert isinstance(stored[axis], tuple)
            weight = hand.graph.values[parameter]
            if kind in (data, sequence) and len(weight.spec.shape) == 2:
                reduced = reductions.get(axis, "all_reduce")
                if scheme.stored is whole:
                    assert reduced == "all_reduce"
                elif weight.bytes > 1e8:
                    assert reduced == "reduce_scatter"

"""Every step of a redistribution, emitted as nodes and run with gloo, against slicing the whole value."""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from passes import compat
from passes.graph.layouts import Layout, format_layout, legal, local_shape
from passes.graph.placement_graph import Value
from passes.hardware.axis import Axis
from passes.op_rules.base import PARTIAL, PARTIAL_MAX, REPLICATE, Factors, Placement
from passes.op_rules.call_rules import spec_of
from passes.sharding.pricing.redistribution import priced_hop
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.shard.redistributor import MeshGroups, Redistributor
from tests.helpers.axes import axes_of
from tests.passes.transforms.random_decisions import Free
from tests.passes.transforms.ranks import cut

SHAPES: list[Factors] = [((4, 2), (2, 4)), ((2, 2), (), (6,), (4, 2)), ((8,),), ((2, 2, 4),)]
"""Factors of values: a dim of size 1, dims of one, two and three factors."""
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.int16)
Step = tuple[Factors, torch.dtype, Layout, Layout]


def value_of(factors: Factors, dtype: torch.dtype) -> Value:
    shape = [torch.Size(row).numel() for row in factors]
    return Value(0, "x", spec_of(torch.empty(shape, dtype=dtype)), factors, None)


def steps(sizes: tuple[int, ...]) -> Iterator[Step]:
    """All legal single steps between layouts; types take turns, so that each meets every kind of step."""
    turn = itertools.cycle(DTYPES)
    for factors in SHAPES:
        places = [(d, k) for d, row in enumerate(factors) for k in range(len(row))]
        for source in itertools.product([REPLICATE, PARTIAL, PARTIAL_MAX, *places], repeat=len(sizes)):
            if {PARTIAL, PARTIAL_MAX} <= set(source) or not legal(value_of(factors, torch.float32), source, axes_of(*sizes)):
                continue  # a maximum of sums is nothing that an operator makes
            for axis, target in itertools.product(range(len(sizes)), [REPLICATE, *places]):
                dtype = next(turn)
                if dtype == torch.float8_e4m3fn and source[axis] in (PARTIAL, PARTIAL_MAX):
                    continue  # which no operator adds up
                step = priced_hop(value_of(factors, dtype), source, axis, target, axes_of(*sizes), Free())
                if step is not None:
                    yield factors, dtype, source, step.target


def whole(step: Step, coordinates: tuple[int, ...], seed: int) -> torch.Tensor:
    """What a rank's value is a piece of: one whole value, or one summand for every place along the partial axes."""
    factors, dtype, source, _ = step
    for place, k in zip(source, coordinates):
        seed = seed * 5 + (k + 1 if place in (PARTIAL, PARTIAL_MAX) else 0)
    numbers = torch.randint(-3, 4, value_of(factors, dtype).spec.shape, generator=torch.Generator().manual_seed(seed))
    return numbers > 1 if dtype == torch.bool else numbers.to(dtype)


def reduced(step: Step, place: MeshGroups, seed: int) -> torch.Tensor:
    """The same after the step: summed, or the maximum, over the ranks along the axis that changes, if it was partial."""
    _, dtype, source, target = step
    (axis,) = [a for a, (p, q) in enumerate(zip(source, target)) if p != q]
    if source[axis] not in (PARTIAL, PARTIAL_MAX):
        return whole(step, place.coordinates, seed)
    peers = torch.stack([
        whole(step, (*place.coordinates[:axis], k, *place.coordinates[axis + 1 :]), seed) for k in range(place.axes[axis].size)
    ])
    if dtype == torch.bool:  # a sum of bools is their disjunction
        return peers.any(0)
    return peers.sum(0).to(dtype) if source[axis] == PARTIAL else peers.amax(0)


def emit(step: Step, place: MeshGroups, x: torch.Tensor, value: Value | None = None) -> fx.GraphModule:
    factors, dtype, source, target = step
    graph = fx.Graph()
    node = graph.placeholder("x")
    output = graph.output(node)
    fake_mode = compat.tracing_fake_mode()
    with fake_mode:
        node.meta["val"] = torch.empty_strided(x.shape, x.stride(), dtype=dtype)
    insert = CallInserter(graph, output, fake_mode=fake_mode)
    output.args = (Redistributor(place).hop(insert, node, value or value_of(factors, dtype), source, target),)
    return fx.GraphModule({}, graph)


def run_steps(rank: int, sizes: tuple[int, ...]) -> dict[str, int]:
    """Run all steps on this rank; returns how many there were of each kind and type."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"axis{k}" for k in range(len(sizes))))
    names = tuple(mesh.get_group(k).group_name for k in range(len(sizes)))
    place = MeshGroups(axes_of(*sizes), tuple(mesh.get_coordinate()), names)
    counts: dict[str, int] = {}
    for seed, step in enumerate(steps(sizes)):
        factors, dtype, source, target = step
        value = value_of(factors, dtype)
        x = cut(whole(step, place.coordinates, seed), value, source, place)
        if seed % 3 == 0 and x.ndim > 1:  # another order in memory, as after a permuted product
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        before = x.clone()
        made = emit(step, place, x)(x)
        what = f"{factors} {dtype} {format_layout(source)} -> {format_layout(target)} on {place.coordinates}"
        assert tuple(made.shape) == local_shape(value, target, place.axes), what
        assert torch.equal(made, cut(reduced(step, place, seed), value, target, place)), what
        assert torch.equal(x, before), f"{what}: the operand was written to"
        axis = next(a for a in range(len(sizes)) if source[a] != target[a])
        kinds = ["S" if isinstance(p, tuple) else p for p in (source[axis], target[axis])]
        counts[f"{kinds[0]}->{kinds[1]} {dtype}"] = counts.get(f"{kinds[0]}->{kinds[1]} {dtype}", 0) + 1
    return counts


ROWS, ROW_FACTORS = (5, 3), {(0, 0), (2, 1)}
"""Rows of two ranks, and the factors of values that are split in these proportions; the others are split evenly."""


def part(x: torch.Tensor, value: Value, placement: Placement, axis: Axis, rank: int) -> torch.Tensor:
    if not isinstance(placement, tuple):
        return x
    dim, factor = placement
    sizes = axis.parts(value.factors[dim][factor], placement in value.batch)
    apart = x.unflatten(dim, value.factors[dim]).narrow(dim + factor, sum(sizes[:rank]), sizes[rank])
    return apart.flatten(dim, dim + len(value.factors[dim]) - 1)


def run_unequal_steps(rank: int) -> dict[str, int]:
    """The same along one axis whose ranks have unequal rows."""
    mesh, axis = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), Axis("dp", 2, rows=ROWS)
    place, counts = MeshGroups((axis,), (rank,), (mesh.get_group(0).group_name,)), dict[str, int]()
    factors: Factors = ((8, 2), (4,), (2, 8))
    places = [(d, k) for d, row in enumerate(factors) for k in range(len(row))]
    hops = itertools.product([REPLICATE, PARTIAL, PARTIAL_MAX, *places], [REPLICATE, *places])
    for seed, (source, target) in enumerate(hops):
        dtype = DTYPES[seed % 3]
        value = replace(value_of(factors, dtype), batch=frozenset(ROW_FACTORS))
        if priced_hop(value, (source,), 0, target, place.axes, Free()) is None:
            continue
        step: Step = (factors, dtype, (source,), (target,))
        x = part(whole(step, place.coordinates, seed), value, source, axis, rank)
        x = x.transpose(0, -1).contiguous().transpose(0, -1) if seed % 2 else x.contiguous()
        made = emit(step, place, x, value)(x)
        assert torch.equal(made, part(reduced(step, place, seed), value, target, axis, rank)), step
        kind = f"{source if isinstance(source, str) else 'S'}->{target if isinstance(target, str) else 'S'}"
        counts[kind] = counts.get(kind, 0) + ({source, target} & ROW_FACTORS != set())
    return counts


def test_a_step_between_unequal_rows_leaves_every_rank_with_its_piece(launch):
    mine, other = launch(run_unequal_steps)
    assert mine == other == {"R->S": 2, "P->R": 0, "P->S": 2, "M->R": 0, "S->R": 2, "S->S": 14}


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_a_step_leaves_every_rank_with_its_piece(launch, sizes):
    counts, *others = launch(run_steps, world_size=torch.Size(sizes).numel(), args=(sizes,), timeout_s=110)
    assert all(other == counts for other in others)
    if len(sizes) == 2:  # enough steps for every kind to meet every type
        kinds = ("R->S", "S->R", "S->S", "P->R", "P->S", "M->R")
        assert set(counts) == {f"{kind} {dtype}" for dtype in DTYPES for kind in kinds
                               if dtype != torch.float8_e4m3fn or kind[0] not in "PM"}


def test_a_step_that_needs_no_copy_emits_none():
    """The outermost dim is gathered as it lies; an inner one is unpacked."""
    place = MeshGroups(axes_of(2), (0,), ("axis0",))

    def targets(source: Layout, target: Layout) -> list[str]:
        step = (((4,), (6,)), torch.float32, source, target)
        x = torch.empty(local_shape(value_of(step[0], step[1]), source, place.axes))
        return [n.target.__name__ for n in emit(step, place, x).graph.nodes if n.op == "call_function"]

    assert targets(((0, 0),), ("R",)) == ["all_gather_into_tensor.default", "wait_tensor.default"]
    assert targets(((1, 0),), ("R",))[:2] == ["all_gather_into_tensor.default", "wait_tensor.default"]
    assert targets(((1, 0),), ("R",))[2:] == ["reshape.default", "permute.default", "reshape.default"]
    assert targets(("R",), ((0, 0),)) == ["slice.Tensor"]
    assert targets(("P",), ("R",)) == ["all_reduce.default", "wait_tensor.default"]
    assert "clone.default" not in targets(("P",), ((0, 0),))

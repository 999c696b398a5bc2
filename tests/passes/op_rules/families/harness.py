"""Run one call whole and, by each of its strategies, on parts; compare.

A `Sample` is a call with real tensors. For every strategy of its rule and every axis size that divides, the operands
are cut as the strategy says (P: random summands; M: random values whose maximum is the operand; S: pieces of a factor),
the localized call runs once per rank in this process, and the results are put together by their placements. On a mesh of
two axes there is a strategy for each, and what one rank of the first axis holds is cut again for the second.
"""
from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.analyses.dim_factors import RuledCall, factorize
from passes.compat import inductor_decompositions, pytree
from passes.graph.shard_offset import ShardOffset
from passes.json_records import FrozenMap
from passes.op_rules.base import (
    PARTIAL,
    PARTIAL_MAX,
    REPLICATE,
    Factors,
    Placement,
    Rule,
    Spec,
    Strategy,
    format_placement,
    strategies,
)
from passes.op_rules.call_rules import apply_rule, call_of
from passes.op_rules.families.view_ops import view_letters
from passes.op_rules.local_call import LocalCall
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.shard.localization import localize, ordered_ranges, shifted_ranges
from passes.transforms.shard.shard_range import ShardRange

AXIS_SIZES = (2, 3, 4)
inductor_decompositions()  # some primitives are registered when inductor's lowerings are imported
_generator = torch.Generator().manual_seed(0)


def f(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random floats."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64).to(dtype)


def i(high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Random integers in [low, high)."""
    return torch.randint(low, high, shape, generator=_generator).to(dtype)


def b(*shape: int) -> torch.Tensor:
    """Random bools."""
    return torch.rand(shape, generator=_generator) < 0.5


def permutation(n: int) -> torch.Tensor:
    return torch.randperm(n, generator=_generator)


def overloads(*namespaces: str) -> list[Any]:
    """All functional operators of the namespaces, sorted by name."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace in namespaces:
            op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
            if op is not None and not op._schema.is_mutable:
                found.append(op)
    return found


@dataclass(frozen=True)
class Sample:
    """`expect`: strategies that the rule must allow, as "inputs -> outputs" (`describe`); others are run all the same.

    stand_in: what computes the call here, if the operator has no CPU kernel. values: False if results are not defined
    by the operands (`empty`); then only shapes are compared. on: the device of the fake tensors that rules and rewrite see.
    """

    target: Any
    args: tuple
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expect: tuple[str, ...] = ()
    stand_in: Callable | None = None
    values: bool = True
    on: str = "cpu"
    whole: bool = False

    def __str__(self) -> str:
        args, kwargs = pytree.tree_map(
            lambda x: list(x.shape) if isinstance(x, torch.Tensor) else x, (self.args, dict(self.kwargs))
        )
        return f"{self.target} {args} {kwargs or ''}".rstrip()


def sample(target: Any, *args: Any, expect: str = "", stand_in: Callable | None = None, values: bool = True,
           on: str = "cpu", whole: bool = False, **kwargs: Any) -> Sample:
    """`expect` separates strategies by ";". `whole`: the call has no strategy that splits anything, on purpose."""
    wanted = tuple(" ".join(e.split()) for e in expect.split(";") if e.strip())
    return Sample(target, args, kwargs, wanted, stand_in, values, on, whole)


def describe(strategy: Strategy) -> str:
    """`S(0) R -> S(0)`"""
    sides = (" ".join(map(format_placement, side)) for side in (strategy.inputs, strategy.outputs))
    return " -> ".join(sides).strip()


# --- cutting and joining ----------------------------------------------------------------------------------------------


def _apart(x: torch.Tensor, dim: int, row: Sequence[int]) -> torch.Tensor:
    return x.reshape(*x.shape[:dim], *row, *x.shape[dim + 1 :])


def _summands(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    if x.dtype == torch.bool:  # a sum of bools is their disjunction
        return [torch.where(b(*x.shape), x, False) if k else x & ~torch.zeros_like(x) for k in range(n)]
    if x.dtype.is_complex:
        parts = [torch.complex(f(*x.shape), f(*x.shape)).to(x.dtype) for _ in range(n - 1)]
    elif x.dtype.is_floating_point and x.dtype.itemsize < 4:  # exact: what is rounded away must not grow in the sum
        parts = [i(3, *x.shape, low=-2, dtype=x.dtype) for _ in range(n - 1)]
    elif x.dtype.is_floating_point:
        parts = [f(*x.shape, dtype=x.dtype) for _ in range(n - 1)]
    else:  # of the whole range, so that the sum wraps
        range_ = torch.iinfo(x.dtype)
        parts = [i(range_.max, *x.shape, low=range_.min, dtype=x.dtype) for _ in range(n - 1)]
    return [*parts, x - sum(parts)]


def _below(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    """Values whose elementwise maximum is x; at every place at least one rank has it."""
    owner = i(n, *x.shape)
    if x.dtype == torch.bool:
        return [torch.where(owner == k, x, False) for k in range(n)]
    return [torch.where(owner == k, x, x - i(5, *x.shape).to(x.dtype)) for k in range(n)]


def cut(x: torch.Tensor, placement: Placement, factors: Factors, n: int) -> list[torch.Tensor]:
    """What each of `n` ranks holds."""
    if placement == REPLICATE:
        return [x] * n
    if placement == PARTIAL:
        return _summands(x, n)
    if placement == PARTIAL_MAX:
        return _below(x, n)
    dim, factor = placement
    row = factors[dim]
    local = list(x.shape)
    local[dim] //= n
    return [part.reshape(local) for part in _apart(x, dim, row).chunk(n, dim + factor)]


def _rounds(x: torch.Tensor) -> bool:
    return x.dtype.is_complex or x.dtype.is_floating_point and x.dtype.itemsize > 1


def join(parts: Sequence[torch.Tensor], placement: Placement, factors: Factors, rounding: float = 0.0) -> torch.Tensor:
    """Inverse of `cut`."""
    if placement == REPLICATE:
        tolerance = {"rtol": rounding, "atol": rounding} if rounding and _rounds(parts[0]) else {}
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], equal_nan=True, msg=lambda m: f"ranks differ: {m}", **tolerance)
        return parts[0]
    if placement == PARTIAL:
        total = sum(parts[1:], parts[0])
        return total
    if placement == PARTIAL_MAX:
        return torch.stack(list(parts)).amax(0)
    dim, factor = placement
    row = list(factors[dim])
    row[factor] //= len(parts)
    shape = list(parts[0].shape)
    shape[dim] *= len(parts)
    return torch.cat([_apart(part, dim, row) for part in parts], dim + factor).reshape(shape)


def _divided(factors: Factors, placement: Placement, n: int) -> Factors:
    """Factors of one of `n` parts."""
    if not isinstance(placement, tuple):
        return factors
    dim, factor = placement
    return tuple(tuple(size // n if (d, k) == (dim, factor) else size for k, size in enumerate(row))
                 for d, row in enumerate(factors))


def cut_along(x: torch.Tensor, layout: Sequence[Placement], factors: Factors, sizes: Sequence[int]) -> list[torch.Tensor]:
    """What each rank of a mesh holds, in row-major order."""
    parts = [x]
    for placement, n in zip(layout, sizes, strict=True):
        parts = [piece for part in parts for piece in cut(part, placement, factors, n)]
        factors = _divided(factors, placement, n)
    return parts


def join_along(parts: Sequence[torch.Tensor], layout: Sequence[Placement], factors: Factors, sizes: Sequence[int],
               rounding: float = 0.0) -> torch.Tensor:
    """Inverse of `cut_along`."""
    if not layout:
        return parts[0]
    each = len(parts) // sizes[0]
    inner = _divided(factors, layout[0], sizes[0])
    return join([join_along(parts[k : k + each], layout[1:], inner, sizes[1:], rounding) for k in range(0, len(parts), each)],
                layout[0], factors, rounding)


# --- running ----------------------------------------------------------------------------------------------------------


class Run:
    """A sample with its rule and its whole results."""

    def __init__(self, sample: Sample, rounding: float = 0.0):
        """rounding: how far sums may be apart, absolute and relative; 0 stands for what torch.testing takes."""
        self.sample, self.rounding = sample, rounding
        self.fake_mode = FakeTensorMode()
        self.tensors = [x for x in pytree.tree_leaves((sample.args, dict(sample.kwargs))) if isinstance(x, torch.Tensor)]
        graph, node = self._emit(self.tensors, lambda insert, args, kwargs: insert(sample.target, *args, **kwargs))
        self.call = call_of(node)
        self.rule = apply_rule(self.call)
        self.results = self._execute(graph, self.tensors)
        self.combinations = 0

    def factors(self, finer: bool) -> list[Factors]:
        """Factors of operands, then results. `finer`: as if other calls took every dim of composite size apart."""
        shapes = [s.shape for s in self.call.operands] + [s.shape for s in self.call.results]
        count = len(self.call.operands)
        assert self.rule is not None
        calls = [RuledCall(self.rule, tuple(range(count)), tuple(range(count, len(shapes))))]
        if finer:
            for value, shape in enumerate(list(shapes)):
                apart = [p for s in shape for p in _two_factors(s)]
                shapes.append(tuple(apart))
                a, b_, sizes, _ = view_letters(shape, tuple(apart))
                letters = [tuple(tuple(row) for row in side) for side in (a, b_)]
                calls.append(RuledCall(Rule((letters[0],), (letters[1],), FrozenMap(sizes)), (value,), (len(shapes) - 1,)))
        return factorize(shapes, calls)[: count + len(self.call.results)]

    def check(self, pairs: int = 0) -> set[str]:
        """Run all strategies; returns their descriptions. Raises AssertionError naming the first that is wrong.

        pairs: how many pairs of strategies to run on meshes of two axes."""
        if self.rule is None:
            return set()
        seen: set[str] = set()
        for finer in (False, True):
            factors = self.factors(finer)
            ins, outs = factors[: len(self.call.operands)], factors[len(self.call.operands) :]
            found = strategies(self.rule, ins, outs)
            for strategy in found:
                seen.add(describe(strategy))
                for n in AXIS_SIZES:
                    if _divides((strategy,), ins, outs, (n,)):
                        self._compare((strategy,), ins, outs, (n,), strided=finer)
            for chosen, sizes in _pairs(found, ins, outs, pairs):
                self._compare(chosen, ins, outs, sizes, strided=finer)
        return seen

    def _compare(self, chosen: Sequence[Strategy], ins: list[Factors], outs: list[Factors], sizes: Sequence[int],
                 strided: bool) -> None:
        """chosen: a strategy for each axis, whose sizes follow."""
        where = (f"{self.sample}: {' and '.join(map(describe, chosen))} on {' x '.join(map(str, sizes))} ranks, "
                 f"factors {ins} -> {outs}")
        self.combinations += 1
        operands = [cut_along(x, [s.inputs[k] for s in chosen], g, sizes) for k, (x, g) in enumerate(zip(self.tensors, ins))]
        if strided:
            operands = [[_strided(x) for x in parts] for parts in operands]
        try:
            ranks = self._locals(operands, chosen, sizes)
            for port, (whole, own) in enumerate(zip(self.results, outs)):
                parts, layout = [results[port] for results in ranks], [s.outputs[port] for s in chosen]
                assert all(part.dtype == whole.dtype for part in parts), f"dtype {parts[0].dtype}, not {whole.dtype}"
                expected = cut_along(whole, layout, own, sizes)[0].shape
                assert all(part.shape == expected for part in parts), f"local {parts[0].shape}, expected {expected}"
                if self.sample.values:
                    self._close(parts, join_along(parts, layout, own, sizes, self.rounding), whole, chosen)
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error

    def _close(self, parts: Sequence[torch.Tensor], joined: torch.Tensor, whole: torch.Tensor, chosen: Sequence[Strategy]
               ) -> None:
        if not _rounds(whole):
            torch.testing.assert_close(joined, whole, check_stride=False)
            return
        # Summands may be greater than their sum, and so is what is rounded off them.
        greatest = max((float(x[x.isfinite()].abs().max()) for x in parts if x[x.isfinite()].numel()), default=0.0)
        tolerance = {"rtol": self.rounding, "atol": self.rounding * max(1.0, greatest)} if self.rounding else {}
        if not any(PARTIAL in s.inputs or PARTIAL in s.outputs for s in chosen):
            torch.testing.assert_close(joined, whole, equal_nan=True, check_stride=False, **tolerance)
            return
        # What is not finite is no sum: infinite summands of either sign are not a number.
        finite = whole.isfinite()
        torch.testing.assert_close(joined[finite], whole[finite], equal_nan=True, check_stride=False, **tolerance)

    def _locals(self, operands: list[list[torch.Tensor]], chosen: Sequence[Strategy], sizes: Sequence[int]
                ) -> list[list[torch.Tensor]]:
        """Results of every rank. Ranks share a graph unless theirs depends on their range."""
        found, graph, depends = [], None, True
        for rank, coordinates in enumerate(itertools.product(*map(range, sizes))):
            mine = [parts[rank] for parts in operands]
            if graph is None or depends:
                graph, depends = self._local_graph(mine, chosen, sizes, coordinates)
            found.append(self._execute(graph, mine))
        return found

    def _local_graph(self, operands: list[torch.Tensor], chosen: Sequence[Strategy], sizes: Sequence[int],
                     coordinates: Sequence[int]) -> tuple[fx.Graph, bool]:
        """What one rank runs, and whether that depends on which one it is."""

        def part(is_input: bool, tensor: int, dim: int) -> ShardRange | None:
            count, strides = 1, []
            for axis, (strategy, n) in reversed([*enumerate(zip(chosen, sizes))]):
                placement = (strategy.inputs if is_input else strategy.outputs)[tensor]
                if isinstance(placement, tuple) and placement[0] == dim:
                    strides.append((f"axis{axis}", count))
                    count *= n
            if count == 1:
                return None
            offset = ShardOffset((self.call.operands if is_input else self.call.results)[tensor].shape[dim] // count,
                                 tuple(strides))
            return ShardRange(offset.at({f"axis{k}": own for k, own in enumerate(coordinates)}), offset.count, offset)

        def shape(spec: Spec, port: int) -> tuple[int, ...]:
            local = list(spec.shape)
            for strategy, n in zip(chosen, sizes):
                placement = strategy.outputs[port]
                if isinstance(placement, tuple):
                    local[placement[0]] //= n
            return tuple(local)

        ranges, ordered = shifted_ranges(self.rule, part), ordered_ranges(self.rule, part)

        def emit(insert: CallInserter, args: tuple, kwargs: Mapping[str, Any]) -> fx.Node:
            return localize(
                LocalCall(
                    target=self.sample.target, args=args, kwargs=kwargs,
                    global_shapes=tuple(s.shape for s in self.call.results),
                    local_shapes=tuple(shape(s, port) for port, s in enumerate(self.call.results)),
                    rule=self.rule, ranges=ranges, ordered=ordered, strides=self.call.strides,
                ),
                insert,
            )

        return self._emit(operands, emit)[0], bool(ranges or ordered)

    def _emit(self, tensors: Sequence[torch.Tensor], emit: Callable) -> tuple[fx.Graph, fx.Node]:
        """A graph with a placeholder per tensor and what `emit(insert, args, kwargs)` makes of them."""
        graph = fx.Graph()
        output = graph.output(())
        nodes = []
        for k, tensor in enumerate(tensors):
            with graph.inserting_before(output):
                node = graph.placeholder(f"operand_{k}")
            with self.fake_mode:
                node.meta["val"] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.sample.on
                )
            nodes.append(node)
        left = iter(nodes)
        args, kwargs = pytree.tree_map(
            lambda x: next(left) if isinstance(x, torch.Tensor) else x, (self.sample.args, dict(self.sample.kwargs))
        )
        node = emit(CallInserter(graph, output, fake_mode=self.fake_mode), args, kwargs)
        output.args = (node,)
        graph.lint()
        return graph, node

    def _execute(self, graph: fx.Graph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        out = _Interpreter(_EMPTY, self.sample, graph).run(*tensors)
        return [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)]


_EMPTY = fx.GraphModule({}, fx.Graph())


class _Interpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, sample: Sample, graph: fx.Graph):
        super().__init__(gm, graph=graph)
        self.sample = sample

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is self.sample.target and self.sample.stand_in is not None:
            target = self.sample.stand_in
        return super().call_function(target, args, kwargs)


def _two_factors(size: int) -> tuple[int, ...]:
    """8 -> 4, 2; 16 -> 4, 4; 7 -> 7"""
    inner = next((k for k in range(math.isqrt(size), 1, -1) if size % k == 0), 1)
    return (size // inner, inner) if inner > 1 else (size,)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in another order in memory, as a product of parts that were permuted may have."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x


def _divides(chosen: Sequence[Strategy], ins: Sequence[Factors], outs: Sequence[Factors], sizes: Sequence[int]) -> bool:
    for side, factors in (("inputs", ins), ("outputs", outs)):
        for k, own in enumerate(factors):
            for strategy, n in zip(chosen, sizes):
                placement = getattr(strategy, side)[k]
                if isinstance(placement, tuple):
                    if own[placement[0]][placement[1]] % n:
                        return False
                    own = _divided(own, placement, n)
    return True


def _pairs(found: Sequence[Strategy], ins: Sequence[Factors], outs: Sequence[Factors], count: int
           ) -> list[tuple[tuple[Strategy, Strategy], tuple[int, int]]]:
    """Pairs of strategies that fit a mesh of two axes, chosen at random but alike for equal calls."""
    possible = [(pair, sizes) for pair in itertools.product(found[1:], repeat=2) for sizes in ((2, 2), (2, 3), (3, 2))
                if _divides(pair, ins, outs, sizes)] if count else []
    return random.Random(len(possible)).sample(possible, min(count, len(possible)))


def check(sample: Sample) -> int:
    """Check all strategies of a sample and that the expected ones are among them; returns how many runs were compared."""
    run = Run(sample)
    seen = run.check()
    missing = [e for e in sample.expect if e not in seen]
    assert not missing, f"{sample}: expected strategies {missing}, the rule gives {sorted(seen)}"
    splits = [s for s in seen if "S(" in s]
    if sample.whole:
        assert not splits, f"{sample}: meant to be left whole, but it has {splits}"
    else:
        assert splits, f"{sample}: nothing can be split; rule {run.rule}"
    return run.combinations

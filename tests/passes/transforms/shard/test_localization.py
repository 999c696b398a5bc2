"""Whole call before, local call after: what the rewrite changes in the arguments. That the numbers are right is shown
for every strategy of every rule in tests/passes/op_rules/families."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx

from passes import compat
from passes.graph.shard_offset import ShardOffset
from passes.op_rules.base import Rule
from passes.op_rules.local_call import LocalCall
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.shard.localization import localize, ordered_ranges, shifted_ranges
from passes.transforms.shard.shard_range import ShardRange

aten, prims = torch.ops.aten, torch.ops.prims
RULED = Rule((), (), {})
WORDS = Rule((((),), ((),)), (((),),), {"v": 12}, indexed={"v": 1})


def own(first: int, count: int) -> ShardRange:
    """The part of the rank that has this first, in groups of which one has two ranks with a whole other group each."""
    return ShardRange(first, count, ShardOffset(count, (("outer", 2), ("inner", 1))))


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A local operand."""
    return torch.empty(shape, dtype=dtype)


def after(target: Any, *args: Any, whole: tuple[int, ...], local: tuple[int, ...], rule: Rule | None = RULED,
          ranges: Mapping[int, ShardRange] | None = None, ordered: Mapping[int, ShardRange] | None = None, asks: bool = False,
          strides: tuple = (), **kwargs: Any) -> list[str]:
    """The local calls, as `operator(arguments)`; operands are `x0`, `x1`, results `r0`, `r1`, ..."""
    graph = fx.Graph()
    output = graph.output(())
    fake_mode = compat.tracing_fake_mode()
    names: dict[fx.Node, str] = {}

    def operand(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with graph.inserting_before(output):
            node = graph.placeholder(f"x{len(names)}")
        with fake_mode:
            node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        names[node] = node.name
        return node

    args, kwargs = compat.pytree.tree_map(operand, (args, kwargs))
    call = LocalCall(target, tuple(args), kwargs, (whole,), (local,), rule, ranges or {}, ordered or {}, asks, strides)
    made = localize(call, CallInserter(graph, output, fake_mode=fake_mode))
    assert tuple(made.meta["val"].shape) == local
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "call_function":
            names[node] = f"r{len(lines)}"
            shown, options = fx.map_arg((node.args, dict(node.kwargs)), lambda n: Name(names[n]))
            parts = [str(a) for a in shown] + [f"{k}={v}" for k, v in options.items()]
            lines.append(f"{node.target.__name__.removesuffix('.default')}({', '.join(parts)})")
    return lines


class Name(str):
    __repr__ = str.__str__


CPU = torch.device("cpu")


@pytest.mark.parametrize(("call", "expected"), [
    (dict(target=aten.mm.default, args=(t(4, 8), t(8, 3)), whole=(8, 3), local=(4, 3)), ["mm(x0, x1)"]),
    (dict(target=aten.view.default, args=(t(4, 6), [8, 2, 3]), whole=(8, 2, 3), local=(4, 2, 3)), ["reshape(x0, [4, 2, 3])"]),
    (dict(target=aten.view.default, args=(t(4, 6).t(), [48]), whole=(48,), local=(24,)),
     ["reshape(x0, [24])"]),
    # A dim of 2 on 2 ranks has size 1 on each: it must not be squeezed away.
    (dict(target=aten.squeeze.dim, args=(t(8, 1), 1), whole=(8, 2), local=(8, 1)), ["reshape(x0, [8, 1])"]),
    (dict(target=aten.expand.default, args=(t(1, 3), [8, -1]), whole=(8, 6), local=(4, 3)), ["expand(x0, [4, 3])"]),
    (dict(target=aten.full.default, args=([8, 6], 1.0), whole=(8, 6), local=(8, 3)), ["full([8, 3], 1.0)"]),
    (dict(target=aten.repeat.default, args=(t(4, 3), [4, 2]), whole=(16, 6), local=(8, 6)), ["repeat(x0, [2, 2])"]),
    (dict(target=aten.slice.Tensor, args=(t(6, 4), 0, 4, 8), whole=(4, 4), local=(2, 4)), ["slice.Tensor(x0, 0, 2, 4, 1)"]),
    (dict(target=aten.slice.Tensor, args=(t(6, 4), 0, -4, 2**63 - 1), whole=(4, 4), local=(2, 4)),
     ["slice.Tensor(x0, 0, 4, 6, 1)"]),
    (dict(target=aten.slice.Tensor, args=(t(4, 6), 1, 1, 2**63 - 1, 2), whole=(4, 6), local=(4, 3)),
     ["slice.Tensor(x0, 1, 1, 6, 2)"]),
    (dict(target=aten.slice_scatter.default, args=(t(6, 4), t(2, 4), 0, 8, 12), whole=(12, 4), local=(6, 4)),
     ["slice_scatter(x0, x1, 0, 4, 6, 1)"]),
    (dict(target=aten.convolution.default, args=(t(2, 4, 5), t(4, 1, 3), None, [1], [0], [1], False, [0], 8),
          whole=(2, 8, 3), local=(2, 4, 3)), ["convolution(x0, x1, None, [1], [0], [1], False, [0], 4)"]),
    (dict(target=aten.upsample_nearest1d_backward.default, args=(t(2, 3, 8), [8], [4, 3, 4]), whole=(4, 3, 4),
          local=(2, 3, 4)), ["upsample_nearest1d_backward(x0, [8], [2, 3, 4])"]),
    (dict(target=prims.iota.default, args=(8,), whole=(8,), local=(4,), ordered={0: own(4, 4)},
          kwargs=dict(start=3, step=2, dtype=torch.int64, device=CPU, requires_grad=False)),
     ["iota(4, start=11, step=2, dtype=torch.int64, device=cpu, requires_grad=False)"]),
    (dict(target=aten.arange.start_step, args=(0, 8), whole=(8,), local=(2,), ordered={0: own(6, 2)}),
     ["arange.start_step(6, 8, 1)"]),
    (dict(target=aten.embedding.default, args=(t(3, 8), t(5, dtype=torch.int64)), whole=(5, 8), local=(5, 8), rule=WORDS,
          ranges={1: own(6, 3)}),
     ["sub.Tensor(x1, 6)", "ge.Scalar(r0, 0)", "lt.Scalar(r0, 3)", "bitwise_and.Tensor(r1, r2)", "mul.Tensor(r0, r3)",
      "embedding(x0, r4)", "unsqueeze(r3, -1)", "full([], 0, dtype=torch.float32, device=cpu)",
      "where.self(r6, r5, r7)"]),
    # A collective may leave memory in another order than the kernel knows.
    (dict(target=aten.view_as_complex.default, args=(t(2, 4).t(),), whole=(8,), local=(4,)),
     ["clone(x0, memory_format=torch.contiguous_format)", "view_as_complex(r0)"]),
], ids=lambda x: str(x["target"]) if isinstance(x, dict) else "")
def test_arguments_become_local(call, expected):
    call = dict(call)
    assert after(call.pop("target"), *call.pop("args"), **call.pop("kwargs", {}), **call) == expected


BEGIN = ["coordinate(outer, cpu)", "mul.Tensor(r0, 6)", "coordinate(inner, cpu)", "mul.Tensor(r2, 3)", "add.Tensor(r1, r3)"]


@pytest.mark.parametrize(("call", "expected"), [
    (dict(target=prims.iota.default, args=(12,), whole=(12,), local=(3,), ordered={0: own(6, 3)},
          kwargs=dict(start=3, step=2, dtype=torch.int64, device=CPU, requires_grad=False)),
     ["iota(3, start=3, step=2, dtype=torch.int64, device=cpu, requires_grad=False)",
      "coordinate(outer, cpu)", "mul.Tensor(r1, 6)", "coordinate(inner, cpu)", "mul.Tensor(r3, 3)", "add.Tensor(r2, r4)",
      "mul.Tensor(r5, 2)", "add.Tensor(r0, r6)"]),
    (dict(target=aten.arange.start_step, args=(2, 14), whole=(12,), local=(3,), ordered={0: own(6, 3)}),
     ["arange.start_step(2, 5, 1)", "coordinate(outer, cpu)", "mul.Tensor(r1, 6)", "coordinate(inner, cpu)",
      "mul.Tensor(r3, 3)", "add.Tensor(r2, r4)", "add.Tensor(r0, r5)"]),
    # Of floats, the first counts in how each is rounded.
    (dict(target=aten.arange.start_step, args=(0.0, 6.0, 0.5), whole=(12,), local=(3,), ordered={0: own(6, 3)}),
     ["arange.start_step(3.0, 4.25, 0.5)"]),
    (dict(target=aten.embedding.default, args=(t(3, 8), t(5, dtype=torch.int64)), whole=(5, 8), local=(5, 8), rule=WORDS,
          ranges={1: own(6, 3)}),
     [*BEGIN, "sub.Tensor(x1, r4)", "ge.Scalar(r5, 0)", "lt.Scalar(r5, 3)", "bitwise_and.Tensor(r6, r7)",
      "mul.Tensor(r5, r8)", "embedding(x0, r9)", "unsqueeze(r8, -1)", "full([], 0, dtype=torch.float32, device=cpu)",
      "where.self(r11, r10, r12)"]),
], ids=lambda x: str(x["target"]) if isinstance(x, dict) else "")
def test_the_first_of_a_range_is_asked_for(call, expected):
    """The same calls on all ranks, whichever range is theirs."""
    call = dict(call)
    assert after(call.pop("target"), *call.pop("args"), asks=True, **call.pop("kwargs", {}), **call) == expected


def test_what_reads_memory_gets_the_order_of_the_whole_graph():
    """The operand lies column by column; the whole graph had it row by row."""
    x = t(3, 4).t()
    common = dict(whole=(2, 4), local=(2, 4), rule=None)
    assert after(aten.as_strided.default, x, [2, 4], [1, 3], strides=((3, 1),), **common) == [
        "permute(x0, [0, 1])", "clone(r0, memory_format=torch.contiguous_format)", "permute(r1, [0, 1])",
        "as_strided(r2, [2, 4], [1, 3])",
    ]
    assert after(aten.as_strided.default, x, [2, 4], [1, 3], strides=((1, 4),), **common) == [
        "as_strided(x0, [2, 4], [1, 3])"
    ]


def test_an_operator_whose_indices_nobody_shifts_is_an_error():
    with pytest.raises(AssertionError, match="aten.mm.default: its rule splits an indexed dim, but nothing registered"):
        after(aten.mm.default, t(4, 8), t(8, 3), whole=(4, 3), local=(4, 3), ranges={1: own(0, 4)})


def test_an_operator_whose_positions_nobody_shifts_is_an_error():
    with pytest.raises(AssertionError, match="aten.neg.default: its rule splits a dim of positions"):
        after(aten.neg.default, t(4), whole=(8,), local=(4,), ordered={0: own(4, 4)})


def test_ranges_are_those_of_the_dims_that_are_split():
    lookup = Rule(((("v",), ("h",)), (("i",),)), ((("i",), ("h",)),), {"v": 12, "h": 4, "i": 6}, indexed={"v": 1})
    count = Rule((), ((("p",),),), {"p": 8}, ordered=frozenset("p"))
    assert shifted_ranges(
        lookup, lambda is_input, t, d: own(3, 3) if (is_input, t, d) == (True, 0, 0) else None) == {1: own(3, 3)}
    assert shifted_ranges(lookup, lambda is_input, t, d: own(2, 2) if d == 1 else None) == {}
    assert shifted_ranges(None, lambda is_input, t, d: own(0, 1)) == {}
    assert ordered_ranges(count, lambda is_input, t, d: own(4, 4)) == {0: own(4, 4)}
    assert ordered_ranges(count, lambda is_input, t, d: None) == ordered_ranges(lookup, lambda *x: own(0, 1)) == {}

"""Operations on the time axis: a handmade graph -> values outside and inside the loop."""
from __future__ import annotations

from dataclasses import replace

from passes.analyses.placement_graph_builder import complete
from passes.graph.decision import AFTER
from passes.sharding.microbatch_axis import solve_time_axis
from tests.passes.graphs import Builder, V, aten


def placed(b: Builder, outputs: list[int], microbatches: int = 2):
    graph = complete(b.operations, b.values, b.rules, [(v, None) for v in outputs], microbatches=microbatches)
    return graph, solve_time_axis(graph, microbatches)


def test_the_number_of_a_microbatch_is_the_inner_factor_of_rows_and_no_device_splits_it():
    b = Builder()
    x, w = b.input((8, 6)), b.input((6, 4), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    graph, times = placed(b, [b.call(aten.sum.default, V(y))])
    assert graph.values[y].factors == ((4, 2), (4,)) and graph.values[y].batch == {(0, 0)}
    assert graph.values[y].microbatch == {(0, 1)} and not graph.values[w].microbatch
    assert all((0, 1) not in s.outputs for op in graph.operations for s in op.strategies)
    assert times.makes == (("S(0.1)",), ("P",)) and times.share == 1.0


def test_a_count_that_divides_rows_is_whole_and_what_is_read_after_it_is_in_the_loop():
    b = Builder()
    x, mask = b.input((8, 512)), b.input((8, 512))
    count = b.call(aten.sum.default, V(mask))
    shares = b.call(aten.div.Tensor, V(x), V(count))
    _, times = placed(b, [b.call(aten.sum.default, V(shares))])
    assert times.makes == (("R",), ("S(0.1)",), ("P",))


def test_what_sums_over_the_loop_feeds_nothing_in_it():
    b = Builder()
    x = b.input((8, 512))
    total = b.call(aten.sum.default, V(b.call(aten.mul.Tensor, V(x), V(x))))
    root = b.call(aten.sqrt.default, V(total))
    _, times = placed(b, [root])
    assert times.makes == (("S(0.1)",), ("P",), (AFTER,)) and times.reads[2] == (AFTER,)


def test_a_cut_by_views_within_a_microbatch_leaves_all_whole():
    b = Builder()
    x = b.input((8, 4))
    y = b.call(aten.view.default, V(x), [4, 2, 4])  # 4 microbatches number rows 0 to 3, of which this takes a half apart
    graph, _ = placed(b, [y], microbatches=4)
    assert not any(v.microbatch for v in graph.values)
    assert replace(graph.values[x], users=()).factors == ((2, 2, 2), (4,))

"""The table: short, complete, at most as wide as asked."""
from __future__ import annotations

import pytest

from hpml_compiler.plans.pipeline_records import MicrobatchPlan
from hpml_compiler.visualize.formatting import format_bytes, format_count, format_placements, format_us
from hpml_compiler.visualize.plan_table import MOST_ROWS, describe_microbatches
from tests.helpers.plans import gpt_graph, gpt_plan, operation
from tests.hpml_compiler.visualize.drawings.test_layout import staged_plan


def test_table_of_a_gpt():
    text = gpt_plan(12, listed=2).table(80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) < 27
    assert "mesh dp=2 x tp=4: 8 devices of 1x8:h100-80g" in lines[0]
    assert any("tp=4" in line and "inside a node" in line and "columns" in line for line in lines)
    row = next(line for line in lines if "h.0-11" in line)
    assert [word for word in ("x12", "396 us", "tp: columns", "396 us", "120 us") if word not in row] == []
    for part in ("optimal, bound 598 us, gap 0.10%", "peak 6.00 MiB", "all_reduce x24 (24.0 KiB)", "sort has no rule",
                 "mesh dp=8: 400 us, 27% slower"):
        assert part in text
    assert "note" not in text


def test_table_is_returned_in_a_notebook_too(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "mesh dp=2 x tp=4" in gpt_plan().table()
    assert capsys.readouterr().out == ""


def test_depth_does_not_lengthen_the_table():
    assert len(gpt_plan(96).table().splitlines()) == len(gpt_plan(3).table().splitlines())


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("plan", [gpt_plan(), staged_plan(4)], ids=["modules", "stages"])
def test_width_is_kept(plan, width):
    lines = plan.table(width).splitlines()
    assert max(map(len, lines)) <= width
    heads = next(line for line in lines if " module " in line and " sharding " in line)
    assert heads.endswith("weights" if width >= 80 or plan.graphs[0].pipeline is None else "sent"), "no column is cut"


def test_many_unlike_blocks_are_summed_up():
    graph = gpt_graph(1)
    many = {f"op{i}": operation("aten.mm", f"part{i}", i, [["R", "R"]], [["R", "R"]], 1.0 + i, []) for i in range(60)}
    compute_us = graph.predicted.compute_us + sum(1.0 + i for i in range(60))
    cost = graph.predicted.model_copy(update={"compute_us": compute_us})
    graph = graph.model_copy(update={"operations": graph.operations | many, "predicted": cost})
    text = gpt_plan(1).model_copy(update={"graphs": (graph,)}).table()
    assert f"{63 - MOST_ROWS} cheaper" in text
    assert "part59" in text and "part0 " not in text


def test_a_table_that_does_not_add_up_says_so():
    graph = gpt_graph(2)
    cost = graph.predicted.model_copy(update={"compute_us": 1000.0})
    text = gpt_plan(2).model_copy(update={"graphs": (graph.model_copy(update={"predicted": cost}),)}).table()
    assert "the compute of the blocks adds up to 88.0 us, not 1.00 ms" in text


def test_brackets_in_names_are_text():
    graph = gpt_graph(1)
    left = graph.left_whole[0].model_copy(update={"reason": "dim [red] of [64, 3]"})
    text = gpt_plan(1).model_copy(update={"graphs": (graph.model_copy(update={"left_whole": (left,)}),)}).table()
    assert "dim [red] of [64, 3]" in text


@pytest.mark.parametrize(("text", "expected"), [
    (format_us(0.0), "0.00 us"), (format_us(999.4), "999 us"), (format_us(1e3), "1.00 ms"), (format_us(3e6), "3.00 s"),
    (format_bytes(0), "0 B"), (format_bytes(1023), "1023 B"), (format_bytes(80 * 2**30), "80.0 GiB"),
    (format_count(999), "999"), (format_count(8_030_000_000), "8.03 G"),
    (format_placements(["S(0)", "R"], {"dp": 2, "tp": 2}), "dp S(0)"), (format_placements(["R"], {"dp": 2}), "R"),
    (format_placements([], {}), "R"),
])
def test_formats(text, expected):
    assert text == expected


def test_microbatches_name_the_parameters_that_they_gather_or_say_all():
    parameters = gpt_graph(2).parameters
    sharded = [name for name, each in parameters.items() if each.bytes_per_device < each.bytes_whole]
    times = MicrobatchPlan(count=2, share=1.0, before=(), after=(), sums=(), whole=(), loss_inside=True,
                           gathered=tuple(sharded))
    assert "each gathers all sharded parameters" in describe_microbatches(times, parameters)
    assert len(sharded) > 2
    few = describe_microbatches(times.model_copy(update={"gathered": ("h.0.fc.weight",)}), parameters)
    assert "each gathers h.*.fc.weight" in few

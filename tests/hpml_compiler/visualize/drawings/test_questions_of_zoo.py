"""Twelve questions about plans of real models -> the text of their pictures answers each with what the plan's records say."""
from __future__ import annotations

import functools
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from hpml_compiler.visualize.formatting import format_bytes, format_us
from tests.helpers.zoo_plans import CASES, zoo_plan
from tests.hpml_compiler.visualize.drawings.test_layout import WIDEST, Drawn, overlapping, through_boxes
from tests.hpml_compiler.visualize.drawings.test_questions import Picture

BLOCKS = {"gpt2": "transformer.h.0", "llama": "model.layers.0", "t5": "decoder.block.0", "mixtral": "model.layers.0",
          "vit": "vit.layers.0"}
FIRST_WEIGHT = re.compile(r"(c_fc|gate_proj|wi|gate_up_proj|fc1)(\.weight)?$")
VIEWS = {"overview": {}, "block": {"view": "block"}, "both": {"view": "block", "backward": True}}

pytestmark = [pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot"),
              pytest.mark.parametrize("name", BLOCKS)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("pictures")

    @functools.cache
    def drawn(name: str, view: str) -> Picture:
        options = VIEWS[view] | ({"block": BLOCKS[name]} if view != "overview" else {})
        return Picture(zoo_plan(name), folder, **options)

    return drawn


def graph_of(name):
    return zoo_plan(name).graphs[0]


def panel(picture, axis):
    """The line of a mesh axis in the heading."""
    rest = picture.head[picture.head.index(f"{axis} = "):]
    return re.split(r"\| \w+ = \d+ \|", rest[len(axis) + 3:])[0]


def of_block(name):
    return {key: each for key, each in graph_of(name).operations.items() if each.block.startswith(BLOCKS[name])}


def test_how_is_the_first_weight_of_the_mlp_split(name, pictures):
    graph = graph_of(name)
    key = next(key for key in graph.parameters if key.startswith(BLOCKS[name]) and FIRST_WEIGHT.search(key))
    parameter = graph.parameters[key]
    text = pictures(name, "block").node(key[len(BLOCKS[name]) + 1:].removesuffix(".weight") + " ")
    weight = text.partition("weight")[2].partition("gives")[0]
    columns = 1 if name == "gpt2" else len(parameter.shape) - 2  # GPT-2 stores (in, out)
    for axis, place in zip(graph.mesh, parameter.placements, strict=True):
        words = {"R": ("",), f"S({columns})": ("columns", "ZeRO")}.get(place, ("rows", "ZeRO", "experts"))
        assert (f"{axis}" in weight) == (place != "R") and any(word in weight for word in words), (axis, place, text)


def test_which_axis_crosses_nodes(name, pictures):
    nodes, _, each = CASES[name][0].partition(":")[0].partition("x")
    inner = 1
    for axis, size in reversed(zoo_plan(name).mesh.items()):
        inner *= size
        assert ("between nodes" in panel(pictures(name, "overview"), axis)) == (inner > int(each)), axis
    assert inner == int(nodes) * int(each)


def test_which_collective_costs_most(name, pictures):
    costs: dict[str, Counter[str]] = {axis: Counter() for axis in zoo_plan(name).mesh}
    for move in graph_of(name).redistributions:
        for hop in move.hops:
            costs[hop.axis][hop.collective] += hop.predicted_us * move.multiplicity * bool(hop.bytes)
    for axis, own in costs.items():
        found = re.search(r"a step: (\w+)", panel(pictures(name, "overview"), axis))
        assert (found[1] if found else None) == (own.most_common(1)[0][0] if own.total() else None), own


def test_what_limits_memory(name, pictures):
    parts = zoo_plan(name).peak.parts
    largest = max(parts, key=parts.get)
    shown = re.findall(r"(parameters|optimizer|gradients|saved|recomputed|gathered|transient) ([\d.]+ [KMG]?i?B)",
                       pictures(name, "overview").head)
    assert shown[0] == (largest, format_bytes(parts[largest]))


def test_what_is_slowest(name, pictures):
    graph, nodes = graph_of(name), pictures(name, "overview").nodes
    if graph.pipeline is not None:
        busy = [sum(stage.parts.values()) for stage in graph.pipeline.stages]
        assert f"busy {format_us(max(busy))} " in nodes[f"g0_stage{busy.index(max(busy))}"]
        return
    work: Counter[str] = Counter()
    for each in graph.operations.values():
        work[each.block] += each.predicted_us * graph.runs(each)
    whole = sum(us for block, us in work.items() if block.startswith(BLOCKS[name]))
    assert whole == max(sum(us for block, us in work.items() if block.startswith(own)) for own in work if own.count("."))
    assert f"compute {format_us(whole)}" in pictures(name, "overview").node(BLOCKS[name])


def test_does_it_fit_and_what_is_left(name, pictures):
    plan, head = zoo_plan(name), pictures(name, "overview").head
    assert f"peak {format_bytes(plan.memory.peak)}" in head and "does not fit" not in head
    limit = plan.describe().limit_bytes
    assert (limit is None) == (":cpu" in CASES[name][0])
    assert limit is None or f"{format_bytes(limit - plan.memory.peak)} left" in head


def test_what_is_recomputed(name, pictures):
    graph, picture = graph_of(name), pictures(name, "block")
    kept = graph.kept if graph.pipeline is None else graph.pipeline.stages[0].kept
    again = [key for key in (kept.again if kept else ()) if key in of_block(name)]
    assert ("striped: recomputed in backward" in picture.head) == bool(again)
    assert sum("recomputed in backward" in text for text in picture.nodes.values()) in range(bool(again), len(again) + 1)
    assert bool(again) == (name == "vit")


def test_where_gradients_are_reduced(name, pictures):
    own = of_block(name)
    axes = {hop.axis for move in graph_of(name).redistributions for hop in move.hops
            if hop.bytes and not move.consumer and move.value in own and own[move.value].backward}
    text = " ".join(pictures(name, "both").nodes.values())
    assert set(re.findall(r"of its gradient over (\w+)", text)) == axes
    assert axes or name in ("vit", "gpt2", "mixtral"), "an axis that splits the batch reduces gradients"


def test_which_layers_there_are_and_where_they_run(name, pictures):
    graph, nodes = graph_of(name), pictures(name, "overview").nodes
    for number, stage in enumerate(graph.pipeline.stages if graph.pipeline else ()):
        text = nodes[f"g0_stage{number}"]
        assert all(block in text for block in stage.blocks if block.startswith(BLOCKS[name]))
        assert f"forward {format_us(stage.forward_us)}, backward {format_us(stage.backward_us)}" in text
        assert f"devices {2 * stage.rank}-{2 * stage.rank + 1}" in text
    assert sum(BLOCKS[name] in text and f"before {BLOCKS[name]}" not in text for text in nodes.values()) == 1


def test_is_the_answer_proven(name, pictures):
    solver, head = graph_of(name).solver, pictures(name, "overview").head
    gap = "" if solver.gap is None else f", gap {solver.gap:.2%}"
    assert f"({solver.status}{gap})" in head


def test_what_passes_between_modules_and_how_large_it_is(name, pictures):
    graph, edges = graph_of(name), pictures(name, "overview").edges
    if graph.pipeline is not None:
        on = sum(each.bytes for each in graph.pipeline.stages[0].sends if not each.backward)
        assert f"{format_bytes(on)} a microbatch" in edges["g0_stage0->g0_stage1"]
        return
    sizes = {format_bytes(nbytes) for each in graph.operations.values() for nbytes in each.result_bytes}
    found = [re.search(r": ([\d.]+ \w+)", text)[1] for text in edges.values() if text]
    assert len(found) >= 3 and set(found) <= sizes


def test_what_takes_the_time_of_a_step(name, pictures):
    cost, head = graph_of(name).predicted, pictures(name, "overview").head
    assert f"{format_us(cost.step_time_us)} a step predicted" in head
    if graph_of(name).pipeline is None:
        parts = {"compute": cost.compute_us, "communication": cost.communication_us, "optimizer": cost.optimizer_us}
        for part, us in parts.items():
            assert f"{part} {format_us(us)}" in head or not us
    else:
        assert "waiting for other stages" in head and "2 microbatches under" in head


@pytest.mark.parametrize("view", VIEWS)
def test_labels_and_boxes_are_apart(name, view, tmp_path):
    options = VIEWS[view] | ({"block": BLOCKS[name]} if view != "overview" else {})
    drawn = Drawn(zoo_plan(name).render(tmp_path / "plan.svg", **options).read_text())
    assert drawn.width <= WIDEST and not overlapping(drawn) and not through_boxes(drawn)

"""Questions of a reader -> answered by the text of a plan's pictures, with the plan's own figures."""
from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree

import pytest

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan, PeakRecord, RecomputedCall
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.visualize.formatting import format_bytes, format_us
from tests.helpers.plans import gpt_graph, gpt_plan
from tests.hpml_compiler.visualize.drawings.test_layout import SVG, staged_plan

pytestmark = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot")


def with_graph(plan, **changes):
    return plan.model_copy(update={"graphs": (plan.graphs[0].model_copy(update=changes),)})


def zero3_plan():
    """A plan that stores a weight in parts and uses it whole."""
    graph = gpt_graph(1)
    stored = graph.parameters["h.0.fc.weight"].model_copy(update={"placements": ("S(0)", "R")})
    whole = graph.operations["fc_0"].model_copy(update={"inputs": (("S(0)", "R"), ("R", "R"))})
    return with_graph(gpt_plan(1), parameters=graph.parameters | {"h.0.fc.weight": stored},
                      operations=graph.operations | {"fc_0": whole})


def recomputing_plan():
    peak = PeakRecord(node="gelu_0", block="h.0", again=True, parts={"saved": 100})
    kept = CheckpointingPlan(budget_bytes=2**30, saved_bytes=100, gradient_bytes=0, saved={}, forward=peak, backward=peak,
                             again={"gelu_0": RecomputedCall(block="h.0", predicted_us=1.0)})
    return with_graph(gpt_plan(1), kept=kept, at_peak=Peak(parts={"saved": 5 * 2**20, "parameters": 2**20}, node="gelu_0"))


class Picture:
    """The lines of text of each node, and of the heading."""

    def __init__(self, plan, folder, **options):
        root = ElementTree.fromstring(plan.render(folder / "plan.svg", **options).read_text())
        self.nodes, self.edges, self.heading = {}, {}, []
        for group in root.iter(f"{SVG}g"):
            lines = [(text.text or "").strip() for text in group.findall(f".//{SVG}text")]
            kind = group.attrib.get("class")
            if kind == "graph":
                self.heading = [(text.text or "").strip() for text in group.findall(f"{SVG}text")]
            elif kind in ("node", "edge"):
                (self.nodes if kind == "node" else self.edges)[group.findtext(f"{SVG}title")] = " | ".join(filter(None, lines))
        self.head = " | ".join(self.heading)

    def node(self, *words):
        """The text of the node with these words, which is no piece of an outer module that runs before it."""
        (found,) = [text for text in self.nodes.values()
                    if all(word in text and f"before {word}" not in text for word in words)]
        return found


def test_how_is_the_first_weight_of_the_mlp_split(tmp_path):
    assert "tp: columns" in Picture(gpt_plan(), tmp_path, view="block", block="h.0").node("fc 256 x 64")
    assert "dp: ZeRO-3" in Picture(zero3_plan(), tmp_path, view="block", block="h.0").node("fc 256 x 64")


def test_which_axis_crosses_nodes_what_it_splits_and_which_collective_costs_most(tmp_path):
    plan = gpt_plan().model_copy(update={"cluster": "2x4:h100-80g"})
    head = Picture(plan, tmp_path).head
    dp, tp = head.index("dp = 2"), head.index("tp = 4")
    assert "between nodes" in head[dp:tp] and "between nodes" not in head[tp:] and "inside a node" in head[tp:]
    assert "splits columns, rows" in head[tp:] and "15.0 us, 3.00 KiB a step: all_reduce" in head[tp:]


def test_does_it_fit_what_is_left_and_what_limits_memory(tmp_path):
    head = Picture(recomputing_plan(), tmp_path).head
    assert "peak 6.00 MiB, 1% of 1.00 GiB, 1018 MiB left" in head
    assert re.search(r"saved 5.00 MiB.*parameters 1.00 MiB", head), "the largest part first"
    plan = gpt_plan()
    full = with_graph(plan, memory=plan.graphs[0].memory.model_copy(update={"peak": 100 * 2**30}))
    assert "126% of 79.1 GiB: does not fit, 20.9 GiB too much" in Picture(full, tmp_path).head


def test_what_is_recomputed(tmp_path):
    picture = Picture(recomputing_plan(), tmp_path, view="block", block="h.0")
    assert "recomputed in backward" in picture.node("gelu") and "recomputed" not in picture.node("fc 256 x 64")
    assert "striped: recomputed in backward" in picture.head


def test_where_gradients_are_reduced(tmp_path):
    picture = Picture(gpt_plan(), tmp_path, view="block", block="h.0", backward=True)
    assert "1.00 KiB, 5.00 us" in picture.node("all_reduce of its gradient over dp")


def test_which_stage_is_slowest_what_it_runs_and_what_it_sends(tmp_path):
    plan = staged_plan(4)
    slow = plan.graphs[0].pipeline.stages[2].model_copy(update={"parts": {"compute": 80.0, "communication": 10.0}})
    pipe = plan.graphs[0].pipeline
    plan = with_graph(plan, pipeline=pipe.model_copy(update={"stages": (*pipe.stages[:2], slow, *pipe.stages[3:])}))
    picture = Picture(plan, tmp_path)
    busy = {name: float(re.search(r"busy ([\d.]+) us", text)[1]) for name, text in picture.nodes.items()}
    assert max(busy, key=busy.get) == "g0_stage2" and busy["g0_stage2"] == 90.0
    assert "devices 16-23" in picture.nodes["g0_stage2"] and "h.2" in picture.nodes["g0_stage2"]
    assert "4.00 KiB a microbatch" in picture.edges["g0_stage1->g0_stage2"]
    assert "2 microbatches under 1f1b" in picture.head


def test_how_many_layers_there_are_what_they_cost_and_whether_the_answer_is_proven(tmp_path):
    plan = gpt_plan(12, listed=2)
    picture, found = Picture(plan, tmp_path), plan.describe()
    layers = picture.node("h.0-11")
    (module,) = [each for each in found.steps[0].modules if each.name == "h.0-11"]
    for text in ("x 12", f"compute {format_us(module.compute_us)}", f"communication {format_us(module.communication_us)}",
                 f"{format_bytes(module.parameter_bytes)} a device"):
        assert text in layers
    assert "optimal, gap 0.10%" in picture.head and f"{format_us(found.step_us)} a step predicted" in picture.head

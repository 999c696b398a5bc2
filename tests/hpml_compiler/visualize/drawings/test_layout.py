"""Layout of pictures: modules in the order of execution, labels apart, and edges outside of boxes that are not their own."""
from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree

import pytest

from hpml_compiler.plans.pipeline_records import PipelinePlan, SentPlan, StagePlan
from tests.helpers.plans import gpt_graph, gpt_plan

pytestmark = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot")
SVG = "{http://www.w3.org/2000/svg}"
WIDEST = 1600.0


def staged_plan(stages: int = 4):
    """A plan whose layers are in stages of one layer each."""
    graph = gpt_graph(stages)
    made = []
    for k in range(stages):
        blocks = [f"h.{k}", *(["wte"] if k == 0 else []), *(["(root)"] if k == stages - 1 else [])]
        own = {name: 1 for name, each in graph.operations.items() if any(each.block.startswith(block) for block in blocks)
               or (k == stages - 1 and not each.block)}
        sends = [SentPlan(value=f"add_{k}", bytes=4096, backward=False)] if k < stages - 1 else []
        sends += [SentPlan(value=f"grad_{k}", bytes=4096, backward=True)] if k else []
        made.append(StagePlan(
            blocks=blocks, rank=k, operations=own, parameters=[name for name in graph.parameters if name.startswith(f"h.{k}.")],
            parameter_bytes=100, forward_us=10.0, backward_us=20.0, send_us=1.0, return_us=1.0, saved_bytes=1000, in_flight=2,
            resident_bytes=3000, sends=sends,
            parts={"compute": 50.0, "communication": 10.0, "recompute": 0.0, "optimizer": 5.0}))
    pipe = PipelinePlan(schedule="1f1b", ranks=stages, microbatches=2, step_us=100.0, bubble=0.2, stages=made)
    mesh = {"pp": stages, "dp": 2, "tp": 4}

    def on_all(each):
        return tuple(("R", *placements) for placements in each)

    graph = graph.model_copy(update={
        "mesh": mesh, "pipeline": pipe,
        "parameters": {name: each.model_copy(update={"placements": ("R", *each.placements)})
                       for name, each in graph.parameters.items()},
        "operations": {name: each.model_copy(update={"inputs": on_all(each.inputs), "outputs": on_all(each.outputs)})
                       for name, each in graph.operations.items()},
        "redistributions": tuple(move.model_copy(update={"source": ("R", *move.source), "target": ("R", *move.target)})
                                 for move in graph.redistributions)})
    return gpt_plan().model_copy(update={"graphs": (graph,), "mesh": mesh, "world_size": 8 * stages, "cluster": None})


class Drawn:
    """Boxes of nodes and of texts, and points along edges, of a picture."""

    def __init__(self, svg: str):
        root = ElementTree.fromstring(svg)
        self.width = float(re.match(r"[\d.]+", root.attrib["width"])[0])
        self.nodes: dict[str, tuple[float, float, float, float]] = {}
        self.edges: dict[str, list[tuple[float, float]]] = {}
        self.labels: list[tuple[str, tuple[float, float, float, float]]] = []
        for group in root.iter(f"{SVG}g"):
            kind, title = group.attrib.get("class"), group.findtext(f"{SVG}title") or ""
            shapes = [each for tag in ("path", "polygon") for each in group.iter(f"{SVG}{tag}")]
            points = [pair for each in shapes for pair in _points(each.attrib.get("d") or each.attrib.get("points", ""))]
            if kind == "node" and points:
                self.nodes[title] = _around(points)
            if kind == "edge":
                self.edges[title] = _curve(next(group.iter(f"{SVG}path")).attrib["d"])
            if kind in ("node", "edge", "graph"):
                self.labels += [(text.text or "", _text_box(text)) for text in group.findall(f".//{SVG}text")
                                if (text.text or "").strip() and kind != "graph"]


def _points(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+)[ ,](-?[\d.]+)", text)]


def _around(points):
    return min(x for x, _ in points), min(y for _, y in points), max(x for x, _ in points), max(y for _, y in points)


def _curve(path: str) -> list[tuple[float, float]]:
    """Points along a chain of cubic curves."""
    points, found = _points(path), []
    for k in range(0, len(points) - 3, 3):
        a, b, c, d = points[k:k + 4]
        for step in range(21):
            t = step / 20
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3)
            found.append(tuple(sum(w * p[axis] for w, p in zip(weights, (a, b, c, d))) for axis in (0, 1)))
    return found


def _text_box(text) -> tuple[float, float, float, float]:
    x, y, size = float(text.attrib["x"]), float(text.attrib["y"]), float(text.attrib.get("font-size", 10))
    width = 0.5 * size * len((text.text or "").strip())
    left = x - {"middle": width / 2, "end": width}.get(text.attrib.get("text-anchor", "start"), 0.0)
    return left, y - 0.7 * size, left + width, y


def overlapping(drawn: Drawn) -> list[tuple[str, str]]:
    found = []
    for k, (one, a) in enumerate(drawn.labels):
        found += [(one, other) for other, b in drawn.labels[k + 1:]
                  if min(a[2], b[2]) - max(a[0], b[0]) > 3 and min(a[3], b[3]) - max(a[1], b[1]) > 2]
    return found


def through_boxes(drawn: Drawn) -> list[tuple[str, str]]:
    return [(edge, name) for edge, points in drawn.edges.items() for name, box in drawn.nodes.items()
            if name not in edge.split("->") and any(
                box[0] + 2 < x < box[2] - 2 and box[1] + 2 < y < box[3] - 2 for x, y in points)]


@pytest.mark.parametrize("plan", [gpt_plan(12, listed=2), staged_plan(4), staged_plan(7)],
                         ids=["modules", "4 stages", "7 stages"])
@pytest.mark.parametrize("options", [{"view": "overview"}, {"view": "block", "block": "h.1"},
                                     {"view": "block", "block": "h.1", "backward": True}],
                         ids=["overview", "block", "backward"])
def test_pictures_are_laid_out_to_be_read(tmp_path, plan, options):
    drawn = Drawn(plan.render(tmp_path / "plan.svg", **options).read_text())
    assert drawn.width <= WIDEST and len(drawn.nodes) >= 3 and drawn.edges and len(drawn.labels) >= 2 * len(drawn.nodes)
    assert not overlapping(drawn)
    assert not through_boxes(drawn)


def test_stages_and_modules_are_in_the_order_of_execution(tmp_path):
    def places(plan, names, axis):
        nodes = Drawn(plan.render(tmp_path / "plan.svg").read_text()).nodes
        return [nodes[name][axis] for name in names]

    for plan, names, axis in ((staged_plan(4), [f"g0_stage{k}" for k in range(4)], 0),
                              (staged_plan(7), [f"g0_stage{k}" for k in range(7)], 1),
                              (gpt_plan(), ["g0_0", "g0_1", "g0_2"], 1)):
        found = places(plan, names, axis)
        assert found == sorted(found)

"""The page of a plan: complete, escaped, and free of anything that is loaded from elsewhere."""
from __future__ import annotations

import html.parser
import re
import shutil

import pytest

from hpml_compiler.pages import plan_page
from hpml_compiler.pages.page_parts import page, table, text
from hpml_compiler.pages.timeline_svg import memory_svg, timeline_svg
from hpml_compiler.simulate import simulate
from passes.errors import BadInput
from tests.helpers.plans import gpt_graph, gpt_plan, operation

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot")


class Elements(html.parser.HTMLParser):
    """Elements of a page, with their attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@needs_dot
def test_page_has_the_figures_of_the_plan_and_how_to_make_it_again():
    plan = gpt_plan(12, listed=2)
    made = plan_page.plan_page(plan, ["hpml", "plan", "my model.py:gpt"])
    for part in ("mesh dp=2 x tp=4: 8 devices of 1x8:h100-80g", "optimal, bound 598 us, gap 0.10%", "h.0-11",
                 "tp: columns, rows", "396 us", "120 us", "mesh</th>", "27% slower", "2.13.0+cpu",
                 "hpml plan &#x27;my model.py:gpt&#x27;", "memory_budget"):
        assert part in made, part


@needs_dot
def test_a_click_finds_the_block_of_each_costly_module():
    found = Elements(plan_page.plan_page(gpt_plan())).found
    nodes = {attrs["id"] for tag, attrs in found if attrs.get("class") == "node" and "g0_" in (attrs.get("id") or "")}
    blocks = {attrs["data-node"] for tag, attrs in found if tag == "details"}
    assert blocks == nodes == {"g0_0", "g0_1", "g0_2"}


@needs_dot
def test_names_are_text_and_nothing_is_loaded():
    odd = '</script><img src=http://x onerror=alert(1)>"&\n' + "y" * 300
    graph = gpt_graph(1)
    extra = operation("aten.odd", odd, 9, [], [["S(0)", "R"]], 1e6, ["add_0"])
    parts = {"operations": graph.operations | {odd: extra},
             "parameters": {**graph.parameters, f"{odd}.w": graph.parameters["wte.weight"]}}
    plan = gpt_plan(1).model_copy(update={"graphs": (graph.model_copy(update=parts),), "options": {odd: odd}})
    made = plan_page.plan_page(plan, ["hpml", odd])
    found = Elements(made).found
    assert {tag for tag, _ in found}.isdisjoint({"img", "link", "iframe", "object", "image", "use"})
    assert sum(tag == "script" for tag, _ in found) == 1
    assert not any(name.startswith("on") or name in ("src", "href", "xlink:href") and not (value or "").startswith("#")
                   for _, attrs in found for name, value in attrs.items())
    assert "default-src &#x27;none&#x27;" in made


def test_without_dot_the_page_has_all_but_the_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    made = plan_page.plan_page(gpt_plan())
    assert "apt-get install graphviz" in made and "h.0-2" in made and "tp: columns, rows" in made


def test_a_page_that_cannot_be_written_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="the page of the plan"):
        plan_page.write_page(gpt_plan(), tmp_path / "no" / "plan.html")


def test_timeline_has_each_event_in_its_place_and_memory_its_peak():
    found = simulate(gpt_plan())
    drawn = timeline_svg(found)
    assert drawn.count("<title>") == len(found.events)
    assert all(float(x) <= 1100.5 for x in re.findall(r'<rect x="([\d.]+)"', drawn))
    assert "peak " in memory_svg(found, None) and "limit" not in memory_svg(found, 100 * found.peak_bytes)
    assert "limit" in memory_svg(found, 2 * found.peak_bytes)


def test_tables_sort_by_numbers_and_escape():
    made = table(("name", "time"), [("a<b", ("2 s", 2e6)), ("c", ("3 us", 3.0))], sorts=True)
    assert "a&lt;b" in made and 'data-value="2000000"' in made and made.count("sorts") == 2
    assert table(("a",), []) == "" and "<h1>" not in page(text("<h1>"), [])

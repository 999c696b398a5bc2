"""The drawing: few nodes whatever the depth, edges with collectives, and an answer where `dot` is missing."""
from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree

import pytest

from hpml_compiler.plans.pipeline_records import LossChunksPlan
from hpml_compiler.plans.schema import CollectiveTotal
from hpml_compiler.visualize.description.block_summary import block_summary
from hpml_compiler.visualize.description.module_classes import module_classes
from hpml_compiler.visualize.drawings.labels import AXIS_COLORS, OVER, SPLIT, WHOLE_COLOR
from hpml_compiler.visualize.drawings.plan_sketch import sketch
from passes.errors import BadInput, MissingDependency
from tests.helpers.plans import all_reduce, gpt_graph, gpt_plan, operation


def drawn(graph, opened=(), max_nodes=300):
    return sketch(graph, module_classes(graph), opened, max_nodes)


def labels(found):
    return {name: node.label.splitlines()[0] for name, node in found.nodes.items()}


def named_edges(found):
    names = labels(found)
    return {(names[tail], names[head]): edge for (tail, head), edge in found.edges.items()}


def test_collapsed_is_a_node_for_each_class_of_blocks():
    found = drawn(gpt_graph(96))
    assert list(labels(found).values()) == ["wte", "h.0-95 x96", "(root)", "outputs"]
    edges = named_edges(found)
    assert set(edges) == {("wte", "h.0-95 x96"), ("wte", "(root)"), ("h.0-95 x96", "(root)"),
                          ("(root)", "h.0-95 x96"), ("h.0-95 x96", "outputs")}
    assert edges["(root)", "h.0-95 x96"].backward and not edges["wte", "h.0-95 x96"].backward
    assert edges["h.0-95 x96", "outputs"].collectives == {"all_reduce": CollectiveTotal(96, 96 * 1024)}


def test_collectives_inside_a_block_are_in_its_label():
    assert "inside: all_reduce x3 (3.00 KiB)" in drawn(gpt_graph(3)).nodes["block1"].label


def test_folded_and_whole_plans_look_alike():
    whole, folded = drawn(gpt_graph(12)), drawn(gpt_graph(12, listed=2))
    assert whole == folded


def test_a_layer_that_stands_for_the_one_before_it_keeps_what_it_receives():
    graph = gpt_graph(12, listed=1)
    moves = (*graph.redistributions, all_reduce("add_0", "ln_0", "tp", 11))  # add_0 comes after ln_0
    found = drawn(graph.model_copy(update={"redistributions": moves}))
    assert "inside: all_reduce x23 (23.0 KiB)" in found.nodes["block1"].label


def test_times_are_in_the_label():
    label = drawn(gpt_graph(3)).nodes["block1"].label
    assert "compute 99.0 us" in label and "communication 30.0 us" in label


def test_opened_block_shows_operations_of_one_layer():
    found = drawn(gpt_graph(12), {"h.0-11"})
    assert found.clusters.keys() == {"h.0-11"}
    inside = {node.label.splitlines()[0] for node in found.nodes.values() if node.cluster == "h.0-11"}
    assert inside == {"h.0.ln.weight", "h.0.fc.weight", "h.0.proj.weight", "ln_0", "fc_0", "gelu_0", "proj_0", "add_0",
                      "proj_grad_0"}
    edges = named_edges(found)
    assert edges["proj_0", "add_0"].collectives == {"all_reduce": CollectiveTotal(12, 12 * 1024)}
    assert ("add_0", "ln_0") in edges  # from each layer to the next
    assert ("add_0", "(root)") in edges


def test_too_many_nodes_keeps_the_costly_and_the_paths_between():
    graph = gpt_graph(3)
    everything = {each.name for each in module_classes(graph)}
    found = drawn(graph, everything, max_nodes=6)
    names = set(labels(found).values())
    assert len([node for node in found.nodes.values() if node.kind != "end"]) == 6
    assert {"proj_0", "add_0", "proj_grad_0", "fc_0", "head"} <= names and "gelu_0" not in names
    assert found.left_out == 12 - 6
    assert ("fc_0", "proj_0") in named_edges(found)  # through gelu_0, which is left out
    source = gpt_plan(3).graphviz(expanded=True, max_nodes=6).source
    assert "the 6 cheapest of 12 nodes" in source


def test_plan_without_sources_is_drawn_in_the_order_of_execution():
    graph = gpt_graph(2)
    bare = {name: each.model_copy(update={"sources": ()}) for name, each in graph.operations.items()}
    edges = named_edges(drawn(graph.model_copy(update={"operations": bare})))
    assert edges["wte", "h.0-1 x2"].order and edges["h.0-1 x2", "(root)"].order
    assert not edges["h.0-1 x2", "outputs"].order


def test_value_that_is_no_operation_comes_from_the_inputs():
    graph = gpt_graph(1)
    tokens = graph.redistributions[0].model_copy(update={"value": "tokens", "consumer": "embedding"})
    edges = named_edges(drawn(graph.model_copy(update={"redistributions": (tokens,)})))
    assert edges["inputs", "wte"].collectives["all_reduce"].count == 1


def test_source_has_clusters_and_balanced_braces():
    source = gpt_plan().graphviz(expand="h.1").source  # by the path of any block of the class
    assert "subgraph cluster_g0 {" in source and "subgraph cluster_g0_0 {" in source
    assert source.count("{") == source.count("}")
    assert "<td>all_reduce over dp x3<br/>3.00 KiB</td>" in source


def test_the_title_names_the_devices_and_a_legend_the_colors():
    source = gpt_plan().graphviz(view="operators").source
    assert "mesh dp=2 x tp=4: 8 devices of 1x8:h100-80g" in source
    for word in ("sharded", "whole", "forward", "backward", "collectives", SPLIT, WHOLE_COLOR):
        assert word in source


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot")
def test_labels_lie_inside_the_picture(tmp_path):
    drawn = gpt_plan().render(tmp_path / "plan.svg").read_text()
    left, top, width, height = map(float, re.search(r'viewBox="([^"]+)"', drawn)[1].split())
    shift_x, shift_y = map(float, re.search(r'translate\(([-\d.]+) ([-\d.]+)\)', drawn).groups())
    points = [(float(x) + shift_x, float(y) + shift_y) for x, y in re.findall(r'<text [^>]*x="([-\d.]+)" y="([-\d.]+)"', drawn)]
    assert len(points) > 20 and all(left < x < left + width and top < y < top + height for x, y in points)


def test_only_opened_blocks_are_clusters():
    assert "subgraph cluster_g0_1" not in gpt_plan().graphviz(expand="h.1").source


def test_names_with_quotes_and_backslashes_stay_text():
    graph = gpt_graph(1)
    odd = operation('aten."odd"\\n', "h.0", 9, [], [["S(0)", "R"]], 1.0, ["add_0"])
    plan = gpt_plan(1).model_copy(update={"graphs": (graph.model_copy(update={"operations": {"odd": odd}}),)})
    assert 'odd\\naten.\\"odd\\"\\\\n\\ndp: batch' in plan.graphviz(expanded=True).source


def test_unknown_block_lists_the_known_ones():
    with pytest.raises(BadInput, match="no block h.9") as caught:
        gpt_plan().graphviz(expand=["h.9", "wte"])
    assert "wte, h.0-2, (root)" in caught.value.next_step


def test_several_graphs_share_the_budget():
    plan = gpt_plan().model_copy(update={"graphs": (gpt_graph(3), gpt_graph(2, name="eval"))})
    source = plan.graphviz(expanded=True, max_nodes=10).source
    assert len(re.findall(r"^\t\t+g\d_block\w+ \[", source, re.MULTILINE)) == 10
    assert 'label="eval: ' in source


def test_without_dot_the_source_is_written_and_the_error_says_how(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="Graphviz's program dot is not installed") as caught:
        gpt_plan().render(tmp_path / "plan.svg")
    assert caught.value.exit_code == 4 and "apt-get install graphviz" in caught.value.next_step
    assert (tmp_path / "plan.gv").read_text() == gpt_plan().graphviz().source
    assert not (tmp_path / "plan.svg").exists()


def test_unknown_format_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="type .bmp"):
        gpt_plan().render(tmp_path / "plan.bmp")


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot")
@pytest.mark.parametrize("expanded", [False, True])
def test_dot_draws_it(tmp_path, expanded):
    path = gpt_plan().render(tmp_path / "plan.svg", expanded=expanded)
    assert "</svg>" in path.read_text() and "all_reduce" in path.read_text()


@pytest.mark.parametrize(("options", "error", "known"), [
    ({"view": "map"}, "no view map", "overview, block, operators"),
    ({"view": "block", "block": "h.9"}, "no block h.9", "wte, h.0-2"),
])
def test_unknown_views_and_blocks_list_the_known_ones(options, error, known):
    with pytest.raises(BadInput, match=error) as caught:
        gpt_plan().graphviz(**options)
    assert known in caught.value.next_step


def test_overview_says_how_modules_are_split_what_they_cost_and_what_is_read():
    source = gpt_plan(12, listed=2).graphviz().source
    places = [source.index(f"\tg0_{number} [") for number in range(3)]
    assert places == sorted(places)
    for text in ("h.0-11", "x 12", "dp: batch", "tp: columns, rows", "394 k parameters", "compute 396 us, communication 120 us",
                 "8 x 16 x 64", "splits columns", "of 79.1 GiB"):
        assert text in source, text


def test_overview_says_in_how_many_chunks_the_loss_is_and_what_is_returned_split():
    made = {"loss_chunks": LossChunksPlan(count=8, head="head"), "outputs": {"head": ("S(0)", "R")}}
    graph = gpt_graph(2).model_copy(update=made)
    plan = gpt_plan(2).model_copy(update={"graphs": (graph,)})
    source, table = plan.graphviz().source, plan.table(200)
    assert "the loss is computed in 8 chunks of rows, from head on" in source and "in 8 chunks of rows, from head on" in table
    assert all("8 x 16 x 64 of (root) split (dp: batch), gathered only if it is read" in text for text in (source, table))


def test_what_does_not_fit_is_red_and_said():
    plan = gpt_plan()
    graph = plan.graphs[0]
    full = graph.model_copy(update={"memory": graph.memory.model_copy(update={"peak": 100 * 2**30})})
    source = plan.model_copy(update={"graphs": (full,)}).graphviz().source
    assert "peak 100 GiB, 126% of 79.1 GiB: does not fit" in source and OVER in source


def test_block_has_heavy_operators_with_their_weights_and_collectives_as_nodes():
    source = gpt_plan(12, listed=2).graphviz(view="block", block="h.7").source
    for text in ("fc 256 x 64", "tp: columns", "proj 64 x 256", "tp: rows", "tp: partial sums", "all_reduce over tp",
                 "1.00 KiB, 5.00 us", "gelu"):
        assert text in source, text
    assert "of its gradient" not in source
    both = gpt_plan(12, listed=2).graphviz(view="block", block="h.7", backward=True).source
    assert "all_reduce of its gradient over dp" in both and "backward" in both


def test_a_block_of_thousands_of_operators_has_its_costliest_and_says_how_many_are_left_out():
    graph, rows, last = gpt_graph(1), [["S(0)", "R"]], "add_0"
    many = {}
    for k in range(3000):
        op, last_before = ("aten.mm.default" if k % 3 else "aten.add.Tensor"), last
        last = f"op{k}"
        many[last] = operation(op, "h.0", f"c{k}", rows, rows, 1.0 + k % 7, [last_before])
    graph = graph.model_copy(update={"operations": graph.operations | many})
    found = block_summary(graph, next(each for each in module_classes(graph) if each.name == "h.0"))
    assert len(found.steps) == 300 and found.left_out > 2500 and min(step.us for step in found.steps.values()) == 6.0
    source = gpt_plan(1).model_copy(update={"graphs": (graph,)}).graphviz(view="block", block="h.0").source
    assert f"the {found.left_out} cheapest of {found.left_out + 300} steps are not drawn: " in source


def test_one_axis_has_one_color_in_all_views():
    for options in ({}, {"view": "block"}, {"view": "operators"}):
        source = gpt_plan().graphviz(**options).source
        assert AXIS_COLORS[0] in source and AXIS_COLORS[1] in source


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot")
@pytest.mark.parametrize("view", ["overview", "block", "operators"])
def test_names_that_could_be_markup_are_shown_and_never_run(tmp_path, view):
    odd = '<script>alert(1)</script>&"' + "x" * 300
    graph = gpt_graph(1)
    names = {name: each for name, each in graph.parameters.items()} | {f"{odd}\n.weight": graph.parameters["wte.weight"]}
    extra = operation(f"aten.{odd}", odd, 9, [["R", "R"]], [["S(0)", "R"]], 1e6, [f"{odd}\n.weight"])
    graph = graph.model_copy(update={"parameters": names, "operations": graph.operations | {odd: extra}})
    drawn = gpt_plan(1).model_copy(update={"graphs": (graph,)}).render(tmp_path / "plan.svg", view=view).read_text()
    assert "<script" not in drawn and "&lt;script" in drawn
    xml.etree.ElementTree.fromstring(drawn)

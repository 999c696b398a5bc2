"""Equal blocks are folded, unlike ones are not, and nothing gets lost on the way."""
from __future__ import annotations

import pytest

from hpml_compiler.visualize.description.describe_plan import describe_step
from hpml_compiler.visualize.description.module_classes import block_path, module_classes
from tests.helpers.plans import gpt_graph, operation


@pytest.mark.parametrize(("module", "block"), [
    ("", ""), ("(root)", ""), ("lm_head", "lm_head"), ("transformer.wte", "transformer.wte"), ("0.conv", "0"),
    ("transformer.h.3.attn.c_attn", "transformer.h.3"), ("vit.embeddings.patch.projection", "vit.embeddings"),
    ("encoder.block.1.layer.0", "encoder.block.1"),
])
def test_block_path(module, block):
    assert block_path(module) == block


def test_equal_layers_are_one_class():
    modules = describe_step(gpt_graph(3)).modules
    assert [(each.name, each.count) for each in modules] == [("wte", 1), ("h.0-2", 3), ("(root)", 1)]
    layers = modules[1]
    assert layers.parameter_count == 3 * (64 + 2 * 256 * 64)
    assert layers.compute_us == pytest.approx(3 * 33.0)
    assert layers.communication_us == pytest.approx(3 * 10.0)
    assert {axis: total.count for axis, total in layers.communication.items()} == {"tp": 3, "dp": 3}


def test_one_layer_listed_for_many_counts_as_many():
    whole = {each.name: each for each in describe_step(gpt_graph(12)).modules}
    folded = {each.name: each for each in describe_step(gpt_graph(12, listed=2)).modules}
    assert set(whole) == set(folded) == {"wte", "h.0-11", "(root)"}
    for name, each in whole.items():
        assert folded[name].count == each.count
        assert folded[name].compute_us == pytest.approx(each.compute_us)
        assert folded[name].communication_us == pytest.approx(each.communication_us)
        assert folded[name].parameter_count == each.parameter_count
        assert {axis: total.bytes for axis, total in folded[name].communication.items()} == {
            axis: total.bytes for axis, total in each.communication.items()}


def test_a_layer_that_lives_elsewhere_stands_apart():
    graph = gpt_graph(4)
    other = graph.parameters["h.1.fc.weight"].model_copy(update={"placements": ("R", "R")})
    graph = graph.model_copy(update={"parameters": graph.parameters | {"h.1.fc.weight": other}})
    assert [(each.name, each.count) for each in module_classes(graph)][1:3] == [("h.0,2-3", 3), ("h.1", 1)]


def test_a_layer_with_another_forward_stands_apart():
    graph = gpt_graph(3)
    extra = operation("aten.relu", "h.2", 99, [["S(0)", "R"]], [["S(0)", "R"]], 1.0, ["add_2"])
    graph = graph.model_copy(update={"operations": graph.operations | {"relu": extra}})
    assert [each.name for each in module_classes(graph)][1:3] == ["h.0-1", "h.2"]


def test_sums_do_not_depend_on_the_folding():
    graph = gpt_graph(5)
    modules = describe_step(graph).modules
    assert sum(each.compute_us for each in modules) == pytest.approx(graph.predicted.compute_us)
    assert sum(each.communication_us for each in modules) == pytest.approx(graph.predicted.communication_us)
    assert sum(each.parameter_bytes for each in modules) == sum(p.bytes_per_device for p in graph.parameters.values())


def test_the_model_s_own_operations_between_modules_are_pieces_of_their_own():
    graph = gpt_graph(2)
    rows = [["S(0)", "R"]]
    pool = operation("aten.pool", "", 20, rows, rows, 3.0, ["add_0"])
    skip = operation("aten.cat", "(root)", 21, rows * 2, rows, 4.0, ["pool", "embedding"])
    first = graph.operations["ln_1"].model_copy(update={"sources": ("skip", "h.1.ln.weight")})
    names = list(graph.operations)
    at = names.index("ln_1")
    operations = {**{name: graph.operations[name] for name in names[:at]}, "pool": pool, "skip": skip, "ln_1": first,
                  **{name: graph.operations[name] for name in names[at + 1:]}}
    modules = describe_step(graph.model_copy(update={"operations": operations})).modules
    assert [(each.name, each.count) for each in modules] == [
        ("wte", 1), ("h.0-1", 2), ("(root) before h.1", 1), ("(root)", 1)]
    assert sum(each.compute_us for each in modules) == pytest.approx(graph.predicted.compute_us)

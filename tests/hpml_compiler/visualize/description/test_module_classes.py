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


def test_an_outer_module_s_operations_run_between_its_inner_ones():
    rows = [["S(0)", "R"]]

    def made(name, block, *sources, dtype="float32"):
        return {name: operation(f"aten.{name.rstrip('2')}", block, name, rows * len(sources), rows, 1.0, sources).model_copy(
            update={"dtype": dtype, "result_bytes": (64,)})}

    graph = gpt_graph(0)
    weights = {f"body.{name}.weight": graph.parameters["wte.weight"] for name in ("wte", "wpe", "h.0", "h.1", "norm")}
    operations = {**made("mask", "body", "tokens", dtype="bool"), **made("word", "body.wte", "body.wte.weight"),
                  **made("place", "body.wpe", "body.wpe.weight"), **made("sum", "body", "word", "place"),
                  **made("attend", "body.h.0", "sum", "mask", "body.h.0.weight"),
                  **made("attend2", "body.h.1", "attend", "mask", "body.h.1.weight"),
                  **made("norm", "body.norm", "attend2", "body.norm.weight"), **made("scale", "body", "norm")}
    back = operation("aten.back", "body.norm", "back", rows, rows, 1.0, ["norm"], backward=True)
    step = describe_step(graph.model_copy(update={
        "parameters": weights, "operations": operations | {"back": back}, "redistributions": ()}))
    names = [each.name for each in step.modules]
    assert names == ["body", "body.wte", "body.wpe", "body before h.0", "body.h.0-1", "body.norm", "body after norm"]
    edges = {(names[each.tail], names[each.head]): (each.bytes, each.backward_bytes) for each in step.edges}
    assert edges == {("body.wte", "body before h.0"): (64, 64), ("body.wpe", "body before h.0"): (64, 64),
                     ("body before h.0", "body.h.0-1"): (64, 64), ("body", "body.h.0-1"): (64, 0),  # a mask has no gradient
                     ("body.h.0-1", "body.norm"): (64, 64), ("body.norm", "body after norm"): (64, 64)}


def test_a_module_that_is_called_again_is_a_piece_for_each_reader():
    rows = [["S(0)", "R"]]
    graph, value, operations, parameters = gpt_graph(0), "tokens", {}, {}
    for number, block in enumerate(("wte", "drop", "h.0", "drop", "head")):
        weight = [f"{block}.weight"] if block != "drop" else []
        parameters |= {name: graph.parameters["wte.weight"] for name in weight}
        operations[f"op{number}"] = operation("aten.op", block, number, rows, rows, 1.0, [value, *weight])
        value = f"op{number}"
    step = describe_step(graph.model_copy(update={"parameters": parameters, "operations": operations, "redistributions": ()}))
    names = [each.name for each in step.modules]
    assert names == ["wte", "drop before h.0", "h.0", "drop before head", "head"]
    assert [(each.tail, each.head) for each in step.edges] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_modules_without_parameters_are_apart_where_others_run_in_between_and_unread_ones_come_before_their_reader():
    rows = [["S(0)", "R"]]
    graph, value, operations = gpt_graph(0), "tokens", {}
    parameters = {"shared.weight": graph.parameters["wte.weight"]}
    for number, kind in enumerate(("fc", "relu", "fc", "relu")):
        weight = [f"net.{number}.weight"] if kind == "fc" else []
        parameters |= {name: graph.parameters["wte.weight"] for name in weight}
        name = f"{kind}_{number}"
        operations[name] = operation(f"aten.{kind}", f"net.{number}", kind, rows, rows, 1.0, [value, *weight])
        value = name
    operations["head"] = operation("aten.mm", "head", "head", rows, rows, 1.0, [value, "shared.weight"])
    step = describe_step(graph.model_copy(update={"parameters": parameters, "operations": operations, "redistributions": ()}))
    assert [(each.name, each.read_by) for each in step.modules] == [
        ("net.0,2", ()), ("net.1", ()), ("net.3", ()), ("shared", ("head",)), ("head", ())]


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

"""explain: placement, communication, and help for unknown names."""
from __future__ import annotations

import pytest

from passes.errors import BadInput
from tests.helpers.plans import gpt_graph, gpt_plan


def test_operation():
    text = gpt_plan(12, listed=2).explain("proj_1")
    assert "aten.proj, forward, in h.1.proj, class proj_last" in text
    assert "dp=2: dim 0 is sharded into 2 parts, one per device" in text
    assert "tp=4: partial: the value is the sum over the devices" in text
    assert "11 runs per step: 110 us of 418 us compute" in text
    assert "reads input 1 from h.1.proj.weight as tp S(1)" in text
    assert "dp S(0), tp P to dp S(0) by all_reduce over tp (1.00 KiB, 5.00 us), 11 times per step" in text


def test_consumer_sees_the_redistribution_before_it():
    assert "before it, proj_0" in gpt_plan().explain("add_0")


def test_parameter():
    text = gpt_plan().explain("h.0.fc.weight")
    assert "trainable parameter, float32[256, 64], 64.0 KiB unsharded, 16.0 KiB per device" in text
    assert "tp=4: dim 0 is sharded" in text and "read by fc_0" in text
    assert "in words, stored as tp: columns" in text and "used as tp: columns" in text
    assert "part 2 of 4 of columns: devices 1, 5" in text
    assert "without a collective" in text


def with_gradients(graph):
    """The plan of a graph whose parameters `proj` know their gradients."""
    parameters = {name: each.model_copy(update={"gradient": f"proj_grad_{name.split('.')[1]}"}) if "proj" in name else each
                  for name, each in graph.parameters.items()}
    return gpt_plan().model_copy(update={"graphs": (graph.model_copy(update={"parameters": parameters}),)})


def test_the_gradient_of_a_parameter_and_what_its_reduction_costs():
    text = with_gradients(gpt_graph()).explain("h.1.proj.weight")
    assert ("its gradient proj_grad_1 is computed as dp P, tp S(1) and redistributed to tp S(1) by all_reduce over dp=2 "
            "(1.00 KiB, 5.00 us)") in text
    graph = gpt_graph()
    quiet = graph.model_copy(update={"redistributions": ()})
    assert "needs no reduction" in with_gradients(quiet).explain("h.1.proj.weight")


def test_a_reduction_before_a_view_counts():
    graph = gpt_graph(1)
    view = graph.operations["proj_grad_0"].model_copy(update={"kind": "view", "sources": ("made",)})
    made = graph.operations["proj_grad_0"].model_copy(update={"kind": "matmul"})
    moves = tuple(move.model_copy(update={"value": "made", "consumer": "proj_grad_0"}) if move.value == "proj_grad_0"
                  else move for move in graph.redistributions)
    graph = graph.model_copy(update={"operations": {**graph.operations, "made": made, "proj_grad_0": view},
                                     "redistributions": moves})
    assert "its gradient made is computed as dp P, tp S(1)" in with_gradients(graph).explain("h.0.proj.weight")


def test_lines_are_as_long_as_asked_for():
    text = with_gradients(gpt_graph()).explain("h.1.proj.weight", width=60)
    assert max(map(len, text.splitlines())) <= 60 and "all_reduce over dp=2" in " ".join(text.split())


def test_parameter_of_a_layer_that_is_not_listed_points_to_the_one_that_is():
    text = gpt_plan(12, listed=2).explain("h.7.fc.weight")
    assert "see h.0.fc.weight of an equal block" in text and "no redistribution" not in text


def test_a_replicated_operation_has_a_reason():
    assert "replicated: dim 1 (100) is not a multiple of tp=4" in gpt_plan().explain("head")


def test_factors_are_in_words():
    graph = gpt_graph(1)
    fc = graph.operations["fc_0"].model_copy(update={"outputs": (("S(0)", "S(2.1)"),)})
    plan = gpt_plan(1).model_copy(update={"graphs": (graph.model_copy(update={"operations": {"fc_0": fc}}),)})
    assert "tp=4: factor 1 of dim 2 is sharded" in plan.explain("fc_0")


def test_name_in_several_graphs_is_explained_in_each():
    plan = gpt_plan().model_copy(update={"graphs": (gpt_graph(3), gpt_graph(3, name="eval"))})
    text = plan.explain("wte.weight")
    assert "wte.weight in GPT" in text and "wte.weight in eval" in text


@pytest.mark.parametrize(("name", "expected"), [("h.0.fc.wight", "h.0.fc.weight"), ("proj_grad", "proj_grad_0"),
                                                ("qqqq", "name one of wte.weight")])
def test_unknown_names_get_suggestions(name, expected):
    with pytest.raises(BadInput, match=f"no node or parameter '{name}'") as caught:
        gpt_plan().explain(name)
    assert expected in caught.value.next_step


def test_what_stands_in_the_way_of_a_split_is_named():
    text = gpt_plan().explain("wte.weight")
    assert "not split over tp, although its vocabulary or features could be: the plan keeps it whole" in text
    graph = gpt_graph()
    odd = graph.parameters["wte.weight"].model_copy(update={"shape": (99, 63), "dims": "99 vocabulary, 9 heads*7"})
    plan = gpt_plan().model_copy(update={"graphs": (graph.model_copy(update={
        "parameters": graph.parameters | {"wte.weight": odd}}),)})
    assert "not split over tp: 4 divides none of its sizes (99, 9 x 7)" in plan.explain("wte.weight")
    assert "not split over tp" not in gpt_plan().explain("h.0.fc.weight")

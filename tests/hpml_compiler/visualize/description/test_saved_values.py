"""Saved values: each storage once, and under a budget with the operation that makes it."""
from __future__ import annotations

import pytest

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan, OffloadedValue, PeakRecord, SavedValue
from hpml_compiler.plans.pipeline_records import MicrobatchPlan
from hpml_compiler.plans.schema import HopPlan, Redistribution
from hpml_compiler.visualize.description.block_summary import block_summary
from hpml_compiler.visualize.description.describe_plan import describe_step
from hpml_compiler.visualize.description.module_classes import module_classes
from hpml_compiler.visualize.description.saved_values import VIEWS, saved_bytes, short_name
from passes.op_rules.rule_table import operator_of
from tests.helpers.plans import gpt_graph, gpt_plan, operation
from tests.helpers.zoo_plans import zoo_plan

ROWS = [["S(0)", "R"]]


def with_sizes(graph, **sizes):
    """The graph with (bytes, saved) of these operations' results."""
    operations = dict(graph.operations)
    for name, (nbytes, saved) in sizes.items():
        operations[name] = operations[name].model_copy(update={"result_bytes": nbytes, "saved": saved})
    return graph.model_copy(update={"operations": operations})


def read_back(graph, *names):
    """The graph with an operation of backward that reads these."""
    back = operation("aten.add", "h.0", "back", [ROWS[0]] * len(names), ROWS, 0.0, names, backward=True)
    return graph.model_copy(update={"operations": graph.operations | {"back": back}})


def test_a_saved_view_keeps_the_memory_of_what_it_is_a_view_of_once():
    graph = with_sizes(gpt_graph(1), head=((8,), (True,)))
    views = {name: operation("aten.view.default", "h.0", name, ROWS, ROWS, 0.0, [source])
             for name, source in (("flat", "fc_0"), ("twice", "flat"), ("weight", "h.0.fc.weight"))}
    graph = with_sizes(graph.model_copy(update={"operations": graph.operations | views}), fc_0=((100,), (False,)),
                       flat=((100,), (True,)), twice=((100,), (True,)), weight=((7,), (True,)), gelu_0=((30, 5), (True, False)))
    assert saved_bytes(graph) == {"gelu_0": 30, "head": 8}, "of what is saved, what backward reads"
    graph = read_back(graph, "twice", "flat")
    assert saved_bytes(graph) == {"fc_0": 100, "gelu_0": 30, "head": 8}
    again = read_back(with_sizes(graph, proj_grad_0=((9,), (True,))), "twice", "gelu_0", "proj_grad_0")
    assert saved_bytes(again) == {"fc_0": 100, "gelu_0": 30, "proj_grad_0": 9}, "forward computes what is listed in backward"
    assert block_summary(again, module_classes(again)[1]).saved_bytes == 139
    times = MicrobatchPlan(count=2, share=1.0, before=("ln_0", "gelu_0"))
    looped = with_sizes(graph, ln_0=((12,), (False,)))
    looped.operations["embedding"] = graph.operations["embedding"].model_copy(update={"sources": ("wte.weight", "tokens")})
    looped = looped.model_copy(update={"microbatches": times})
    assert saved_bytes(looped) == {"fc_0": 50, "gelu_0": 35, "head": 4, "ln_0": 12}, "held for all microbatches"
    assert sum(each.saved_bytes for each in describe_step(graph).modules) == 138


def test_what_backward_reads_as_a_gathered_copy_is_saved_so():
    graph = with_sizes(gpt_graph(1), ln_0=((4096,), (True,)), fc_0=((100,), (True,)), head=((8,), (True,)))
    whole = ("S(0)", "R")
    gather = HopPlan(collective="all_gather", axis="tp", bytes=16384, predicted_us=5.0)
    move = Redistribution(value="ln_0", shape=(8, 16, 64), dtype="float32", consumer="fc_0", source=("S(0)", "S(1)"),
                          target=whole, hops=[gather])
    back = operation("aten.mm", "h.0.fc", "back", [whole, ["S(0)", "S(2)"]], [["P", "S(0)"]], 1.0, ["ln_0", "fc_0"],
                     backward=True)
    graph = graph.model_copy(update={"operations": graph.operations | {"back": back},
                                     "redistributions": (*graph.redistributions, move)})
    assert saved_bytes(graph) == {"fc_0": 100 + 8 * 16 * 64 * 4 // 2, "head": 8}  # no copy of ln_0 as it was made
    found = block_summary(graph, module_classes(graph)[1])
    saved = {step.title: step.saved_bytes for step in found.steps.values() if step.saved_bytes}
    assert saved == {"all_gather": 16384, "fc 256 x 64": 100} and found.saved_bytes == 16484
    assert "saved 16.0 KiB" in gpt_plan(1).model_copy(update={"graphs": (graph,)}).graphviz(view="block", block="h.0").source


@pytest.mark.parametrize("name", ["llama", "mixtral", "vit"])
def test_views_are_the_operators_of_the_rule_table_that_share_memory(name):
    for each in zoo_plan(name).graphs[0].operations.values():
        assert bool(operator_of(each.op).view) == (short_name(each) in VIEWS), each.op


def kept_plan(saved, offloaded):
    graph = with_sizes(gpt_graph(1), fc_0=((96,), ()), proj_0=((64,), ()), gelu_0=((96, 8), ()), add_0=((64,), ()))
    peak = PeakRecord(node="fc_0", block="h.0", again=False, parts={"saved": 1})
    kept = CheckpointingPlan(
        budget_bytes=10**6, saved_bytes=1, gradient_bytes=1, again={}, forward=peak, backward=peak,
        saved={name: SavedValue(block=block, bytes=nbytes) for name, (block, nbytes) in saved.items()},
        offloaded={name: OffloadedValue(block="h.0.fc", bytes=nbytes, predicted_us=1.0) for name, nbytes in offloaded.items()})
    return graph.model_copy(update={"kept": kept})


def test_values_that_a_rank_names_otherwise_are_with_the_operation_that_makes_them():
    graph = kept_plan({"addmm_1": ("h.0.proj", 64), "getitem_3": ("h.0", 8), "add_0": ("h.0", 64), "wait_tensor": ("h.0", 1024),
                       "mul": ("h.0", 5), "other": ("wte", 11)}, {"addmm": 96})
    found = block_summary(graph, module_classes(graph)[1])
    saved = {step.title: step.saved_bytes for step in found.steps.values() if step.saved_bytes}
    assert saved == {"proj 64 x 256": 64, "gelu": 8, "add": 64, "all_reduce": 1024}
    assert {step.title: step.offloaded_bytes for step in found.steps.values() if step.offloaded_bytes} == {"fc 256 x 64": 96}
    assert (found.path, found.saved_bytes, found.offloaded_bytes) == ("h.0", 64 + 8 + 64 + 1024 + 5, 96)
    source = gpt_plan(1).model_copy(update={"graphs": (graph,)}).graphviz(view="block", block="h.0").source
    assert "h.0 saves 1.14 KiB, offloads 96 B to the host" in source and "host memory" in source

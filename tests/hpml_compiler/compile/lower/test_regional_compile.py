"""Equal layers with compile_blocks -> the whole graph's results, from few compiled segments."""
from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.compile.lower.lowering import interpreted
from hpml_compiler.compile.lower.regional_compile import RegionalCall
from passes.transforms.regional.graph_segments import cut_segments
from tests.helpers.frozen import fresh
from tests.hpml_compiler.compile import test_budget, test_budget_in_microbatches
from tests.hpml_compiler.runtime.common import full


class Layer(nn.Module):
    def __init__(self, drop: float):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = drop

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.drop, training=self.drop > 0)


class Deep(nn.Module):
    def __init__(self, layers: int = 5, drop: float = 0.0):
        super().__init__()
        self.layers = nn.ModuleList(Layer(drop) for _ in range(layers))
        self.head = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def trained(model: nn.Module, call, steps: int = 2) -> list:
    """Losses, gradients and buffers of some steps."""
    found = []
    for k in range(steps):
        torch.manual_seed(k)
        loss = call(torch.linspace(-1, 1, 8 * 16).view(8, 16).sin())
        loss.backward()
        found += [full(loss.detach()), *(full(p.grad).clone() for p in model.parameters()), model.seen.clone()]
        model.zero_grad()
    return found


def with_blocks(model: nn.Module, blocks: str, **options) -> list:
    torch.compiler.reset()
    fresh()
    copied = copy.deepcopy(model)
    return trained(copied, torch.compile(copied, backend="hpml", options={"compile_blocks": blocks, **options}))


def counts(caplog) -> list[tuple[int, int]]:
    """(segments, how many differ) of each graph that was cut."""
    said = re.findall(r"in (\d+) segments of which (\d+) are distinct", caplog.text)
    return [(int(a), int(b)) for a, b in said]


def test_without_a_compiler_results_are_eager_ones(caplog):
    caplog.set_level(logging.INFO, "hpml")
    torch.manual_seed(0)
    model = Deep(6)
    eager = copy.deepcopy(model)
    torch.testing.assert_close(with_blocks(model, "on", compiler="eager"), trained(eager, eager), rtol=1e-5, atol=1e-7)
    assert len(counts(caplog)) == 2 and all(cut >= different + 4 for cut, different in counts(caplog)), caplog.text


def test_inductor_gives_what_it_gives_for_the_whole_graph(caplog):
    caplog.set_level(logging.INFO, "hpml")
    torch.manual_seed(0)
    model = Deep(8, drop=0.3)
    blocks, whole = with_blocks(model, "on"), with_blocks(model, "off")
    assert len(counts(caplog)) == 2, caplog.text
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("compiler", "options", "layers", "share"), [
    ("inductor", {}, 8, 0.55), ("eager", {"microbatches": 4, "outputs": "whole"}, 8, 0.7)])
def test_blocks_that_save_the_same_are_compiled_once_below_a_budget(compiler, options, layers, share):
    """Layers of one decision share code, and the numbers and the peak are those without regions."""
    def run(**more):
        kind = test_budget_in_microbatches.Features if "microbatches" in options else test_budget.Deep
        return test_budget.trained({"compiler": compiler, **more}, 0.2, lambda dropout: kind(dropout, layers))

    expected, unbounded = run(**options)
    options = {**options, "memory_budget": int(share * unbounded)}
    numbers, peak = run(**options, compile_blocks="on")
    (graph,) = hpml_compiler.last_plan().graphs
    assert graph.kept.again and peak <= 1.03 * options["memory_budget"] and test_budget.equal(numbers, expected)
    assert graph.blocks.keys() == {"forward", "backward"}
    assert all(half.different <= 5 < layers <= half.segments for half in graph.blocks.values()), graph.blocks


def _on_ranks(_rank: int, drop: float, compiler: str) -> tuple[list, list, int]:
    torch.manual_seed(0)
    model, said = Deep(8, drop), []
    log, handler = logging.getLogger("hpml"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    options = {"mesh": {"dp": 2}, "compiler": compiler, "zero": 3}
    found = [with_blocks(model, blocks, **options) for blocks in ("on", "off")]
    return *found, sum("segments of which" in each for each in said)


def test_two_ranks_give_what_the_whole_graph_gives(launch):
    for blocks, whole, cut in launch(_on_ranks, 2, args=(0.3, "inductor")):
        assert cut >= 1
        torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-7)


def in_blocks(gm, compiled):
    blocks = RegionalCall.of(gm)
    assert blocks is not None
    return blocks.run({key: compiled(part.graph(gm)) for key, part in blocks.parts().items()})


def one_layer(x):
    return x + (((x.sin() * 2 + 1).cos() - 3).tanh() / 4).exp().sigmoid()


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def test_values_are_let_go_of_when_they_were_last_read():
    held: list[int] = []

    def layers(x):
        for _ in range(6):
            x = one_layer(x)
        return x

    gm = traced(layers, torch.randn(4))
    call = in_blocks(gm, lambda part: lambda arguments: held.append(len(arguments)) or interpreted(part)(arguments))
    x = torch.randn(4)
    arguments = [x.clone()]
    torch.testing.assert_close(call(arguments)[0], layers(x))
    assert arguments == [] and set(held) == {1}


def test_what_is_written_into_an_input_stands_alone():
    def layers(x, total):
        for _ in range(6):
            x = one_layer(x)
        total.copy_(x)
        return x

    gm = traced(layers, torch.randn(4), torch.zeros(4))
    gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.target is torch.ops.aten.copy_.default or node.is_impure())
    segments = cut_segments(gm)
    assert segments is not None
    (alone,) = [segment for segment in segments if segment.alone]
    assert alone.nodes[0].target is torch.ops.aten.copy_.default
    x, total = torch.randn(4), torch.zeros(4)
    call = in_blocks(gm, interpreted)
    torch.testing.assert_close(call([x, total])[0], total)


def test_other_writes_leave_the_graph_whole():
    def layers(x):
        y = x.clone()
        for _ in range(6):
            y = one_layer(y).add_(1)
        return y

    assert cut_segments(traced(layers, torch.randn(4))) is None


def chained(x, saved, weight):
    """What a layer hands on is read by later layers, too, as it is and as views of it."""
    first = one_layer(x) * saved
    seen = first.view(2, 2)
    for _ in range(16):
        x = one_layer(x) + weight
    y = (x + seen.reshape(4)).sin()
    return one_layer(y), y.view(2, 2), seen.sum()


def test_nothing_is_written_over_that_somebody_needs():
    x, saved, weight = (torch.randn(4) for _ in range(3))
    gm = traced(chained, x, saved, weight)
    blocks = RegionalCall.of(gm, donated={1})
    assert blocks is not None
    donated = [node for segment in blocks.segments for k, node in enumerate(segment.takes) if k in segment.donated]
    inputs = gm.graph.find_nodes(op="placeholder")
    assert inputs[1] in donated and not {inputs[0], inputs[2]} & {*donated} and len(donated) > 5

    def compiled(part):
        run = interpreted(part.graph(gm))

        def call(arguments):
            overwritten = [arguments[k] for k in part.donated]
            results = run(arguments)
            kept = {each.untyped_storage().data_ptr() for each in results}
            for each in overwritten:
                if each.untyped_storage().data_ptr() not in kept:
                    each.fill_(float("nan"))
            return results
        return call

    given = [x.clone(), saved.clone(), weight.clone()]
    results = blocks.run({key: compiled(part) for key, part in blocks.parts().items()})([*given])
    torch.testing.assert_close(results, list(chained(x, saved, weight)))
    assert torch.equal(given[0], x) and torch.equal(given[2], weight) and given[1].isnan().all()


def test_equal_segments_of_which_one_may_write_over_what_it_takes_differ():
    def layers(x):
        kept = []
        for k in range(8):
            x = one_layer(x)
            kept += [x] if k % 2 else []
        return (x, *kept)

    blocks = RegionalCall.of(traced(layers, torch.randn(4)))
    assert blocks is not None
    assert {segment.donated for segment in blocks.segments} == {(), (0,)}
    for segment in blocks.parts().values():
        names = [node.name for node in segment.graph(blocks.gm).graph.find_nodes(op="placeholder")]
        assert names == ["donated_0" if segment.donated else "taken_0"]


@pytest.mark.parametrize("step_ms, device, pays", [(100.0, "cpu", True), (1.0, "cpu", False), (100.0, "meta", False)])
def test_nobody_has_to_ask_for_blocks_where_their_calls_cost_little(step_ms, device, pays):
    def layers(x):
        for _ in range(8):
            x = one_layer(x)
        return x

    gm = traced(layers, torch.randn(4))
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["val"] = torch.empty(4, device=device)
    blocks = RegionalCall.of(gm)
    assert blocks is not None and blocks.report.different < blocks.report.segments <= 40
    assert blocks.costs_little(1e3 * step_ms) == pays

"""A model of equal layers with compile_blocks -> the whole graph's results, from few compiled segments."""
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
from hpml_compiler.compile.blocks import in_blocks
from hpml_compiler.compile.lowering import freeing
from passes.transform.segments import cut_segments
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
    hpml_compiler.reset()
    copied = copy.deepcopy(model)
    return trained(copied, torch.compile(copied, backend="hpml", options={"compile_blocks": blocks, **options}))


def counts(caplog) -> list[tuple[int, int]]:
    """(segments, how many differ) of each graph that was cut."""
    said = re.findall(r"in (\d+) segments of which (\d+) differ", caplog.text)
    return [(int(a), int(b)) for a, b in said]


def test_without_a_compiler_results_are_eager_ones(caplog):
    caplog.set_level(logging.INFO, "hpml")
    torch.manual_seed(0)
    model = Deep(6)
    eager = copy.deepcopy(model)
    torch.testing.assert_close(with_blocks(model, "on", compiler="eager"), trained(eager, eager), rtol=1e-5, atol=1e-7)
    assert len(counts(caplog)) == 2 and all(cut >= different + 4 for cut, different in counts(caplog)), caplog.text


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_inductor_gives_what_it_gives_for_the_whole_graph(drop, caplog):
    caplog.set_level(logging.INFO, "hpml")
    torch.manual_seed(0)
    model = Deep(8, drop)
    blocks, whole = with_blocks(model, "on"), with_blocks(model, "off")
    assert len(counts(caplog)) == 2, caplog.text
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-7)


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
    call = in_blocks(gm, lambda part: lambda arguments: held.append(len(arguments)) or freeing(part)(arguments))
    assert call is not None
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
    call = in_blocks(gm, freeing)
    assert call is not None
    torch.testing.assert_close(call([x, total])[0], total)


def test_other_writes_leave_the_graph_whole():
    def layers(x):
        y = x.clone()
        for _ in range(6):
            y = one_layer(y).add_(1)
        return y

    assert cut_segments(traced(layers, torch.randn(4))) is None

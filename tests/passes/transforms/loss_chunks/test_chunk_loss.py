"""A loss in chunks has the outputs and gradients of the same joint graph at once."""
from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from passes.errors import BadInput
from passes.graph.graph_copy import copy_graph
from passes.graph.module_blocks import runs_in_backward
from passes.tracing.joint_trace import JointTrace, trace
from passes.transforms.loss_chunks.chunk_loss import ChunkLoss, chunk_loss
from tests.helpers.heads import (
    HEADS,
    ROWS,
    TOKENS,
    WORDS,
    Headed,
    batch,
    cap,
    ce,
    distilled,
    make,
    shifted,
    teacher_logits,
    tied,
    z_loss,
)


def traced(model: torch.nn.Module) -> JointTrace:
    (found,) = trace(model, batch(), compiler="eager")
    return found


def values(found: JointTrace, model: torch.nn.Module) -> list[Any]:
    """Values of the graph's inputs, and for its tangents."""
    torch.manual_seed(2)
    given = {**dict(model.named_parameters()), **dict(model.named_buffers()), **dict(zip(("tokens", "labels"), batch()))}
    inputs = [next(x for name, x in given.items() if each.name == name or f"'{name}'" in each.name) for each in found.inputs]
    fakes = [node.meta["val"] for node in found.gm.graph.find_nodes(op="placeholder")][len(inputs):]
    return [*(x.detach() for x in inputs), *(torch.full(x.shape, 3.0, dtype=x.dtype) for x in fakes)]


def results(gm: GraphModule, given: list[Any]) -> list[Any]:
    return tree_leaves(torch.fx.Interpreter(gm).run(*given), is_leaf=lambda x: x is None)


def largest(gm: GraphModule) -> int:
    return max(node.meta["val"].numel() for node in gm.graph.nodes if node.op == "call_function"
               and isinstance(node.meta.get("val"), torch.Tensor) and node.target is not torch.ops.aten.expand.default)


@pytest.mark.parametrize("name", HEADS)
def test_equals_the_loss_at_once(name):
    model = make(name)
    found = traced(model)
    given = values(found, model)
    expected = results(found.gm, given)
    assert largest(found.gm) >= ROWS * WORDS
    for chunks in (2, 3, 8):
        gm = copy_graph(found.gm)
        assert chunk_loss(gm, found.forward_outputs, chunks) == chunks
        assert not [node for node in gm.graph.nodes if node.op == "call_function" and not runs_in_backward(node)
                    and any(map(runs_in_backward, node.all_input_nodes))], "forward reads what backward computes"
        for before, after in zip(expected, results(gm, given), strict=True):
            assert (before is None) == (after is None)
            if before is not None:
                torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
                assert after.stride() == before.stride()
        if chunks == 8:
            assert largest(gm) < largest(found.gm), "nothing is as large as all logits"


SLICED: dict[str, tuple[Any, dict[str, Any]]] = {
    "shifted": (lambda m, h, y: shifted(m.head(h), y), {}),
    "tied, bias, soft cap": (lambda m, h, y: shifted(cap(tied(m, h) + m.bias), y),
                             {"head": None, "bias": torch.nn.Parameter(torch.linspace(0, 1, WORDS))}),
    "second half": (lambda m, h, y: ce(m.head(h)[:, 20:], y[:, 20:]), {"head": torch.nn.Linear(4, WORDS)}),
    "distilled": (lambda m, h, y: distilled(m.head(h)[:, :-1], teacher_logits(m, h)[:, :-1]),
                  {"teacher": torch.nn.Linear(4, WORDS)}),
}


@pytest.mark.parametrize("name", SLICED)
def test_slices_of_rows_leave_more_chunks_than_rows_of_the_batch(name, monkeypatch):
    tokens = torch.arange(80).view(2, 40) % WORDS
    monkeypatch.setitem(globals(), "batch", lambda: (tokens, tokens.flip(1)))
    loss, parts = SLICED[name]
    model = Headed(loss, **parts).double()
    found = traced(model)
    given = values(found, model)
    expected = results(found.gm, given)
    for chunks in (2, 3, 16 if name != "second half" else 5):
        gm = copy_graph(found.gm)
        assert chunk_loss(gm, found.forward_outputs, chunks) == chunks
        torch.testing.assert_close(results(gm, given), expected, rtol=1e-12, atol=1e-12)
        assert [x.stride() for x in results(gm, given) if x is not None] == [x.stride() for x in expected if x is not None]


@pytest.mark.parametrize("other", ["z_loss", "another range"])
def test_rows_that_are_read_elsewhere_stay(other):
    def loss(m: Any, h: Any, y: Any) -> Any:
        logits = m.head(h)
        return shifted(logits, y) + (z_loss(logits) if other == "z_loss" else ce(logits[:, 2:], y[:, 2:]))

    model = Headed(loss).double()
    found = traced(model)
    given = values(found, model)
    expected = results(found.gm, given)
    assert chunk_loss(found.gm, found.forward_outputs, 4) == 4
    torch.testing.assert_close(results(found.gm, given), expected, rtol=1e-12, atol=1e-12)


def said(loss: Any, chunks: int, caplog: pytest.LogCaptureFixture, **parts: Any) -> str:
    found = traced(Headed(loss, **parts).double())
    before = found.gm.code
    with caplog.at_level(logging.WARNING, "hpml"):
        assert chunk_loss(found.gm, found.forward_outputs, chunks) is None
    assert found.gm.code == before
    return caplog.text


MIXED = {
    "sort": lambda m, h, y: m.head(h).flatten().sort().values[:5].sum(),
    "hard examples": lambda m, h, y: F.cross_entropy(m.head(h).flatten(0, 1).softmax(0), y.clamp(min=0).flatten()),
    "norm over rows": lambda m, h, y: ce((lambda x: (x - x.mean((0, 1))) / x.std((0, 1)))(m.head(h)), y),
    "loss scaled by itself": lambda m, h, y: (lambda x: x * x.log())(ce(m.head(h), y)),
}
OPERATOR = {"sort": "sort", "hard examples": "amax", "norm over rows": "sub", "loss scaled by itself": "log"}


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_depend_on_each_other_are_named(name, caplog):
    assert OPERATOR[name] in said(MIXED[name], 2, caplog)


def test_why_nothing_is_in_chunks(caplog):
    assert "no matrix product" in said(lambda m, h, y: h.sum(), 2, caplog)
    assert "two outputs" in said(lambda m, h, y: (lambda x: (ce(x, y), x))(m.head(h)), 2, caplog)
    assert "is returned" in said(lambda m, h, y: (lambda x: (ce(x, y), x.detach()))(m.head(h)), 2, caplog)
    clip = lambda g: g.clamp(-1, 1)  # noqa: E731

    def clipped(m, h, y):
        logits = m.head(h)
        logits.register_hook(clip)
        return ce(logits, y)

    assert "not linear" in said(clipped, 2, caplog)


def test_more_chunks_than_rows():
    found = traced(make("plain"))
    with pytest.raises(BadInput, match=f"{ROWS} rows") as error:
        chunk_loss(found.gm, found.forward_outputs, ROWS + 1)
    assert f"at most {ROWS}" in str(error.value) and TOKENS < ROWS


def test_one_chunk_and_small_logits_leave_the_graph_unchanged():
    found = traced(make("plain"))
    assert not ChunkLoss(found.forward_outputs, 1)(found.gm).modified
    assert not ChunkLoss(found.forward_outputs, "auto")(found.gm).modified
    assert ChunkLoss(found.forward_outputs, 2)(found.gm).modified

"""A loss in chunks through the backend: losses and gradients of eager, and None where eager has None."""
from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config

import hpml_compiler
from hpml_compiler.monitor.profiled_step import StepProfile
from hpml_compiler.options import Options
from passes.errors import BadInput
from tests.helpers.heads import WIDTH, WORDS, Headed, batch, ce, make

STEPS = {"dense before": 2, "tied, shifted, capped": 3, "two heads": 8, "distilled and labels": 3, "with predictions": 8,
         "segmentation, upsampled": 3, "penalty of the hidden state": 3}


@pytest.fixture(autouse=True)
def own_code() -> Iterator[None]:
    """Models of all tests have one class, and Dynamo stops compiling what was compiled too often."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(call: Any, model: torch.nn.Module, scale: float = 3.0) -> list[Any]:
    result = call(*batch())
    loss = result[0] if isinstance(result, tuple) else result
    (scale * loss).backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    for p in model.parameters():
        p.grad = None
    return found


def equal(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", STEPS)
def test_equals_eager(name, caplog):
    model = make(name)
    compiled = torch.compile(model, backend="hpml", options={"compiler": "eager", "loss_chunks": STEPS[name]})
    with caplog.at_level(logging.INFO, "hpml"):
        equal(step(compiled, model), step(model, model))
    assert f"in {STEPS[name]} chunks" in caplog.text
    equal(step(compiled, model, 0.5), step(model, model, 0.5))


@pytest.mark.parametrize("options", [{}, {"memory_budget": "1GiB", "optimizer": "sgd"}])
def test_equals_eager_with_inductor(options, caplog):
    model = make("smoothed")
    compiled = torch.compile(model, backend="hpml", options={"loss_chunks": 3, **options})
    with caplog.at_level(logging.INFO, "hpml"):
        equal(step(compiled, model), step(model, model))
    assert "in 3 chunks" in caplog.text


@pytest.mark.timeout(300)
def test_a_budget_is_met_by_chunks_and_their_peak_is_predicted(caplog):
    words = 512 * WORDS
    model = Headed(lambda m, h, y: ce(m.head(h), y), head=torch.nn.Linear(WIDTH, words, bias=False))
    held, budget = 2 * sum(p.numel() * p.element_size() for p in model.parameters()), 16 << 20
    compiled = torch.compile(model, backend="hpml", options={"memory_budget": budget, "optimizer": "sgd"})
    rows = tuple(x.repeat(1, 6) for x in batch())
    assert 2 * rows[1].numel() * words * 4 > 2 * budget, "all logits and their gradient do not fit"
    with caplog.at_level(logging.INFO, "hpml"):
        compiled(*rows).backward()
    assert "chunks of rows" in caplog.text
    predicted = float(re.findall(r"peak memory is ([\d.]+) (K|M)iB", caplog.text)[0][0])
    compiled(*rows).backward()
    profile = StepProfile("cpu")
    compiled(*rows).backward()
    measured = profile.stop(held)
    assert measured is not None and measured.peak_bytes is not None and measured.peak_bytes <= budget
    assert measured.peak_bytes - held < 1.25 * predicted * 2**20
    assert held < hpml_compiler.last_plan().peak.bytes < budget


@pytest.mark.parametrize("inlines_rows", [False, True])  # as inductor does on CPUs, and on GPUs
def test_nothing_waits_for_all_chunks_in_16_bits(inlines_rows):
    head = torch.nn.Linear(256, 8192, bias=False).bfloat16()
    compiled = torch.compile(lambda h, y: ce(head(h), y), backend="hpml", options={"loss_chunks": 8})
    h, y = torch.randn(1024, 256, dtype=torch.bfloat16, requires_grad=True), torch.arange(1024)
    with config.patch(force_pointwise_cat=inlines_rows):
        for _ in range(2):
            head.zero_grad()
            profile = StepProfile("cpu")
            compiled(h, y).backward()
        measured = profile.stop(0)
    assert measured is not None and measured.peak_bytes is not None
    assert measured.peak_bytes < 7 * head.weight.nbytes, "the gradients, or logits, of all chunks alone would be 8, or 4"
    expected, found = head.weight.grad.clone(), torch.autograd.grad(ce(head(h), y), head.weight)[0]
    torch.testing.assert_close(expected, found, rtol=0.02, atol=1e-4)


def test_logits_that_are_deferred():
    model = Headed(lambda m, h, y: (lambda x: (ce(x, y), x))(m.head(h)), head=torch.nn.Linear(WIDTH, 32 * WORDS * 32)).double()
    compiled = torch.compile(model, backend="hpml", options={"compiler": "eager", "loss_chunks": 4})
    equal(step(compiled, model), step(model, model))
    torch.testing.assert_close(compiled(*batch())[1], model(*batch())[1], rtol=1e-12, atol=1e-12)


def test_gradients_of_one_loss_several_times():
    model = make("plain")
    compiled = torch.compile(model, backend="hpml", options={"compiler": "eager", "loss_chunks": 2})
    loss, expected = compiled(*batch()), model(*batch())
    for found in (loss, expected):
        found.backward(retain_graph=True)
        (2 * found).backward()
        found.grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    equal(loss.grads, expected.grads)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "8", None])
def test_options_that_are_no_number_of_chunks(bad):
    with pytest.raises(BadInput, match="loss_chunks.*whole number"):
        Options.parse({"loss_chunks": bad})


def test_more_chunks_than_rows():
    model = make("plain")
    with pytest.raises(Exception, match="at most 8"):
        torch.compile(model, backend="hpml", options={"compiler": "eager", "loss_chunks": 9})(*batch())

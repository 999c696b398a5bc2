"""A step that goes through its batch in microbatches: the numbers of one that does not, with less saved at once."""
from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
from torch import nn
from torch._guards import TracingContext
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.planner.graph import microbatching
from hpml_compiler.simulate import simulate
from passes import compat
from passes.errors import BadInput
from passes.transforms.microbatch.loop_split import split_at_markers
from tests.hpml_compiler.compile.test_budget import ROWS as ROWS_OF_DEEP
from tests.hpml_compiler.compile.test_budget import WIDTH, Deep, trained
from tests.passes.traced import mlp, transformer

ROWS = 8


def compiled(model: nn.Module, microbatches: int, compiler: str = "eager"):
    hpml_compiler.reset()
    return torch.compile(model, backend="hpml", options={"microbatches": microbatches, "compiler": compiler})


def check(model: nn.Module, batch: tuple, microbatches: int, compiler: str = "eager", loss_of=lambda out: out) -> None:
    """Three steps with another factor before each loss, as a loss scale is, against eager torch; float64."""
    ours, theirs = model.double(), copy.deepcopy(model).double()
    call = compiled(ours, microbatches, compiler)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for step in range(3):
        losses = []
        for run, optimizer in zip((call, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            losses.append(loss_of(run(*batch)))
            (losses[-1] * (1 + step)).backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-14)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of which most are left out in some rows: a mean of means would be another loss."""
    torch.manual_seed(1)
    ids, labels = torch.randint(0, 64, (ROWS, 16)), torch.randint(0, 64, (ROWS, 16))
    labels[0, :14] = labels[5, 2:] = -100
    return ids, labels


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_a_mean_over_unevenly_spread_tokens_is_that_of_the_whole_batch(microbatches):
    check(transformer(64, 32, 4, 1, ROWS, 16)[0], tokens(), microbatches)


class Annealed(nn.Module):
    def __init__(self, with_loss: bool):
        super().__init__()
        self.layer, self.with_loss = nn.Linear(8, 4), with_loss

    def forward(self, x, temperature, number):
        out = torch.tanh(self.layer(x) / temperature) * number
        return out.square().mean() if self.with_loss else out


@pytest.mark.parametrize("with_loss", [True, False])
def test_numbers_that_differ_from_call_to_call_pass_from_part_to_part(with_loss):
    model = Annealed(with_loss).double()
    call = compiled(model, 2)
    for number in range(1, 5):
        batch = torch.randn(ROWS, 8, dtype=torch.double), 2 * 0.9**number, number
        expected, found = (torch.autograd.grad(run(*batch).square().mean(), list(model.parameters())) for run in (model, call))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_inductor_runs_them_too():
    check(mlp(16, 32), (torch.randn(ROWS, 16, dtype=torch.double),), 2, "inductor")


def test_parts_of_a_step_leave_their_inputs_as_they_are(monkeypatch):
    """AOTAutograd names, by their places, inputs of the whole backward that may be written over; a part has others there."""
    compile_half, donated = compat.compile_with_inductor, []

    def noting(gm, inputs, *, is_backward, **options):
        if is_backward:
            donated.append(TracingContext.get().fw_metadata.bw_donated_idxs)
        return compile_half(gm, inputs, is_backward=is_backward, **options)

    monkeypatch.setattr(compat, "compile_with_inductor", noting)
    compiled(mlp(16, 32), 2, "inductor")(torch.randn(ROWS, 16)).backward()
    assert donated == [[]]


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.last(F.dropout(self.first(x).relu(), 0.5))


def test_a_loss_outside_with_the_masks_of_one_device():
    check(Dropped(), (torch.randn(ROWS, 8, dtype=torch.double),), 4, loss_of=lambda out: out.square().mean())


class WithLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        logits = self.layer(x)
        return logits.square().mean(), logits


def test_logits_beside_the_loss():
    check(WithLogits(), (torch.randn(ROWS, 8, dtype=torch.double),), 2, loss_of=lambda out: out[0])
    model = WithLogits()
    _, logits = compiled(model, 2)(x := torch.randn(ROWS, 8))
    torch.testing.assert_close(logits, model.layer(x))


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x):
        out = self.norm(self.layer(x))
        return out.square().mean() + out.sum(), out


def test_where_rows_mix_all_runs_at_once_and_says_why(caplog):
    with caplog.at_level(logging.WARNING, "hpml"):
        check(Normalized(), (torch.randn(ROWS, 8, dtype=torch.double),), 2,
              loss_of=lambda out: out[0] + out[1].pow(3).mean())
    assert "the step is not split into microbatches: rows of the batch depend on each other at" in caplog.text


def test_evaluation_runs_whole_on_any_rows():
    model = mlp(16, 32)
    call = compiled(model, 4)
    with torch.no_grad():
        torch.testing.assert_close(call(x := torch.randn(3, 16)), model(x))


def test_batches_of_other_sizes_go_through_in_as_many_parts_as_divide_them(caplog):
    """As they come in a loop over a loader: Dynamo makes sizes symbols from the second on."""
    model = mlp(16, 32).double()
    call = compiled(model, 4)
    for rows, said in ((8, None), (4, None), (12, None), (6, "into 3 microbatches"), (7, "into 1 microbatches"), (8, None)):
        caplog.clear()
        x = torch.randn(rows, 16, dtype=torch.double)
        expected = torch.autograd.grad(model(x), list(model.parameters()))
        with caplog.at_level(logging.WARNING, "hpml"):
            found = torch.autograd.grad(call(x), list(model.parameters()))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert said in caplog.text if said else "a batch of" not in caplog.text


def test_what_does_not_go_together_yet_is_refused():
    with pytest.raises(BadInput, match="mixed devices does not support microbatches"):
        hpml_compiler.plan(mlp(16, 32), (torch.randn(8, 16),), "1x1:cpu + 1x1:h100-80g", microbatches=2)


@pytest.mark.parametrize(("dropout", "microbatches"), [(0.0, 4), (0.1, 4), (0.0, 16)])
def test_a_plan_says_what_a_step_holds_and_a_run_records_it(dropout, microbatches):
    options = {"compiler": "eager", "microbatches": microbatches}
    _, real = trained(options, dropout)
    recorded = hpml_compiler.last_plan()
    planned = hpml_compiler.plan(Deep(dropout), (torch.randn(ROWS_OF_DEEP, WIDTH),), **options)
    for plan in (recorded, planned):
        said = plan.graphs[0].microbatches
        assert said is not None and said.count == microbatches and said.share > 0.99 and said.loss_inside
        # What is simulated fuses pointwise calls, and these are run one by one: without microbatches it is 16 % below.
        assert simulate(plan).peak_bytes == pytest.approx(real, rel=0.15)
        assert "microbatches" in plan.table() and type(plan).from_json(plan.to_json()) == plan
    whole = hpml_compiler.plan(Deep(dropout), (torch.randn(ROWS_OF_DEEP, WIDTH),), compiler="eager")
    assert planned.predicted.step_time_us >= whole.predicted.step_time_us  # fewer rows at a time are no faster
    with pytest.raises(BadInput, match="the plan has .* microbatches, but"):
        simulate(planned, microbatches=2)


def test_one_part_of_what_is_saved_is_held_at_once():
    def above_state(microbatches: int) -> int:
        gc.collect()
        _, peak = trained({"compiler": "eager", "microbatches": microbatches})
        return peak

    state = above_state(32)  # nearly nothing saved: parameters, gradients, states
    assert above_state(4) - state < 0.3 * (above_state(1) - state)


class Masked(nn.Module):
    """Zeros to write a gradient of the table into, a mask, and a constant that is returned."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(512, 16), nn.Linear(16, 512)

    def forward(self, ids, labels):
        x = self.table(ids)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        x = torch.einsum("ij,bjw->biw", mask, x).tanh()
        return F.cross_entropy(self.layer(x).flatten(0, 1), labels.flatten()), torch.arange(5) * 2


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_what_is_made_of_nothing_is_made_where_it_is_read(monkeypatch, compiler):
    loops = []
    monkeypatch.setattr(microbatching, "split_at_markers", lambda *args: (loops.append(split_at_markers(*args)), loops[-1])[-1])
    check(Masked(), tokens(), 4, compiler, loss_of=lambda out: out[0])
    (loop,) = loops
    segments = [segment for segment in (*loop.before, *loop.after) if segment.gm is not None]
    for gm in (loop.body, *(segment.gm for segment in segments)):  # nothing of it is handed on, but what is returned
        names = {node.name for node in gm.graph.nodes if node.op == "placeholder"}
        assert not any(name.startswith(("full", "iota", "ones", "tril")) for name in names), names
    made = [name for segment in segments for name in segment.makes]
    constants = [name for name in made if name.startswith(("full", "iota", "where", "ones", "mul"))]
    assert len(constants) == 1 and constants[0] in loop.results
    assert any(node.target is torch.ops.prims.iota.default for node in loop.body.graph.nodes)

"""compile_blocks with microbatches and with stages -> whole graphs' results, from few segments."""
from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.compile.lower import regional_compile
from hpml_compiler.compile.lower.regional_compile import RegionalCall
from tests.helpers.frozen import fresh
from tests.hpml_compiler.compile import test_budget
from tests.hpml_compiler.compile.lower.test_regional_compile import Layer
from tests.hpml_compiler.runtime.common import full

ROWS, WIDTH = 8, 16


class Deep(nn.Module):
    """Returns its loss, or what one is made of outside, and what its last layer makes."""

    def __init__(self, layers: int = 8, drop: float = 0.0, outside: bool = False):
        super().__init__()
        self.outside = outside
        self.layers = nn.ModuleList(Layer(drop) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen.add_(1)
        for layer in self.layers:
            x = layer(x)
        out = self.head(x)
        return (out if self.outside else out.square().mean()), x


def model_of(layers: int = 8, drop: float = 0.0, outside: bool = False) -> Deep:
    torch.manual_seed(0)
    return Deep(layers, drop, outside).double()


def of_loss(out, _last):
    return out.square().mean()


def of_both(out, last):
    return out + last.sum()


def trained(model: nn.Module, call, total=of_loss) -> list[torch.Tensor]:
    """Results, gradients and buffers of two steps."""
    found = []
    for k in range(2):
        torch.manual_seed(k)
        out, last = call(torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.double).view(ROWS, WIDTH).sin())
        total(out, last).backward()
        found += [out.detach(), last.detach(), *(full(p.grad).clone() for p in model.parameters()), model.seen.clone()]
        model.zero_grad()
    return found


def with_blocks(model: nn.Module, compile_blocks: str, total=of_loss, **options) -> tuple[list[torch.Tensor], dict]:
    """And what the plan says of blocks."""
    fresh()
    copied = copy.deepcopy(model)
    found = trained(copied, torch.compile(copied, backend="hpml", options={"compile_blocks": compile_blocks, **options}),
                    total)
    return found, hpml_compiler.last_plan().graphs[0].blocks


check = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def check_reports(reports: dict, halves: tuple[str, ...]) -> None:
    assert tuple(reports) == halves
    for report in reports.values():
        assert report.different < report.segments and 2 * report.compiled <= report.calls


@pytest.mark.parametrize(("microbatches", "drop", "outside"), [(2, 0.0, True), (4, 0.3, False)])
def test_microbatches_give_what_one_device_gives(microbatches, drop, outside):
    model = model_of(6 if drop else 8, drop, outside)  # without dropout, six layers stay whole
    found, reports = with_blocks(model, "on", compiler="eager", microbatches=microbatches)
    check_reports(reports, ("forward", "backward"))
    check(found, trained(copied := copy.deepcopy(model), copied))


def test_gradients_at_all_outputs_take_a_step_that_is_compiled_later():
    """Nothing says then which inputs may be written over."""
    model = model_of()
    found, reports = with_blocks(model, "on", of_both, compiler="eager", microbatches=2)
    check_reports(reports, ("forward", "backward"))
    check(found, trained(model, model, of_both))


class Masks(nn.Module):
    """Layers that all get the same, and hand out what dropout leaves of it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        made, total = [], torch.zeros_like(x)
        for layer in self.layers:
            left = F.dropout(torch.ones_like(x), 0.5)
            made.append(left)
            total = total + F.gelu(layer(x) * left).tanh().sin() * left
        return total.square().mean(), torch.cat(made, 1)


def test_blocks_and_microbatches_have_masks_of_their_own():
    fresh()
    model = Masks()
    loss, masks = torch.compile(model, backend="hpml", options={"compile_blocks": "on", "microbatches": 2})(
        torch.randn(ROWS, WIDTH))
    loss.backward()
    assert hpml_compiler.last_plan().graphs[0].blocks
    parts = [part for rows in masks.detach().chunk(2) for part in rows.chunk(6, 1)]
    assert len({tuple(part.flatten().tolist()) for part in parts}) == 12


def test_only_what_blocks_make_for_each_other_is_written_over(monkeypatch):
    made, of = [], RegionalCall.of
    monkeypatch.setattr(RegionalCall, "of", staticmethod(lambda *given: made.append(of(*given)) or made[-1]))
    with_blocks(model_of(), "on", microbatches=2, compiler="eager")
    assert len(made) == 2
    for blocks in made:
        donated = {node for segment in blocks.segments for k, node in enumerate(segment.takes) if k in segment.donated}
        assert donated and {node.op for node in donated} == {"call_function"}


def test_inductor_gives_what_it_gives_for_whole_graphs_and_no_more_is_held():
    """It draws numbers of its own."""
    def run(blocks: str) -> tuple[list[torch.Tensor], int]:
        options = {"microbatches": 4, "compile_blocks": blocks}
        found = test_budget.trained(options, 0.3, lambda drop: test_budget.Deep(drop, 6))
        assert bool(hpml_compiler.last_plan().graphs[0].blocks) == (blocks == "on")
        return found

    (found, peak), (whole, most) = run("on"), run("off")
    check(found, whole, rtol=1e-4, atol=1e-5)
    assert peak <= 1.02 * most


def on_ranks(_rank: int, layers: int, drop: float, cases: list[tuple[dict, tuple[str, ...]]]) -> list[dict]:
    """cases: options, and what is said to be in blocks. Of each, what this rank's plan says."""
    model, found = model_of(layers, drop), []
    expected = trained(copied := copy.deepcopy(model), copied)
    for options, halves in cases:
        with pytest.MonkeyPatch.context() as patch:
            if options.get("compile_blocks") == "auto" and halves:
                patch.setattr(regional_compile, "MOST_LOST", 1e9)  # a step of any length is long enough
            results, reports = with_blocks(model, **{"compile_blocks": "on", **options})
        check_reports(reports, halves)
        check([full(x) for x in results], expected)
        found.append({name: report.model_dump() for name, report in reports.items()})
    return found


STAGES = {"mesh": {"pp": 2}, "microbatches": 4}
BOTH = ("stage 0 forward", "stage 0 backward", "stage 1 forward", "stage 1 backward")
CUT = ("stage 0 forward", "stage 0 weights", "stage 1 forward", "stage 1 backward", "stage 1 weights")


def test_stages_give_what_one_device_gives(launch):
    first, second = launch(on_ranks, 2, (12, 0.3, [
        ({**STAGES, "compiler": "eager", "schedule": "1f1b"}, BOTH),
        ({**STAGES, "compiler": "eager", "schedule": "zero_bubble"}, CUT),
    ]))
    assert first == second


@pytest.mark.timeout(240)
def test_stages_that_inductor_compiles(launch):
    """Nobody has to ask for blocks where a stage takes long; these take no time."""
    launch(on_ranks, 2, (12, 0.0, [({**STAGES, "schedule": "zero_bubble", "compile_blocks": "auto"}, CUT)]), timeout_s=220)


def test_stages_of_few_layers_stay_whole(launch):
    options = {**STAGES, "compiler": "eager"}
    launch(on_ranks, 2, (2, 0.0, [(options, ()), ({**options, "compile_blocks": "auto"}, ())]))

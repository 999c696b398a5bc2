"""Optimizers of a script -> the one with the parameters, and its step's temporary memory, against a real step."""
from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hpml_compiler.monitor.profiled_step import StepProfile
from hpml_compiler.optimizer_transient import OptimizerTransient, transient_of
from hpml_compiler.options import Options
from hpml_compiler.session.optimizer_lookup import held_by, optimizer_name, optimizer_of

MAKES = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam,
    "adam l2": lambda p, **kw: torch.optim.Adam(p, weight_decay=0.1, **kw),
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, **kw),
    "sgd l2": lambda p, **kw: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, **kw),
    "momentum": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "nesterov": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **kw),
    "rmsprop": torch.optim.RMSprop, "rmsprop l2": lambda p, **kw: torch.optim.RMSprop(p, weight_decay=0.1, **kw),
    "adagrad": torch.optim.Adagrad,
    "adagrad l2": lambda p, **kw: torch.optim.Adagrad(p, weight_decay=0.1, **kw),
}
SIZE, COUNT = 100_000, 4


def made(optimizer: torch.optim.Optimizer, device_type: str = "cpu") -> OptimizerTransient:
    return transient_of(Options.parse({"optimizer": optimizer_name(optimizer)}), device_type, optimizer.param_groups)


@pytest.mark.parametrize("settings", [{"foreach": True}, {"foreach": False}], ids=["at once", "one by one"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_a_step_makes_as_much_as_is_said(make, settings):
    weights = [nn.Parameter(torch.ones(SIZE)) for _ in range(COUNT)]
    optimizer = make(weights, **settings)
    for _ in range(2):  # the first makes the state
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        profile = StepProfile("cpu")
        optimizer.step()
        peak = profile.stop().peak_bytes
    said = made(optimizer).bytes_of(4 * SIZE * COUNT, 4 * SIZE)
    assert peak == pytest.approx(said, abs=10_000)


def test_defaults_are_those_of_a_device():
    adamw = Options.parse({"optimizer": "adamw"})
    assert transient_of(adamw, "cuda").at_once == 1 and transient_of(adamw, "cpu").at_once == 0
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], fused=True)
    assert made(optimizer, "cuda").bytes_of(100, 10) == 0


def test_the_optimizer_that_holds_them_is_found_and_others_are_not():
    mine, others = nn.Linear(2, 2), nn.Linear(2, 2)
    assert optimizer_of(list(mine.parameters())) == []
    optimizer, other = torch.optim.RMSprop(mine.parameters()), torch.optim.SGD(others.parameters(), lr=0.1)
    assert optimizer_of(list(mine.parameters())) == [optimizer] and optimizer_of([others.weight]) == [other]
    assert (optimizer_name(optimizer), optimizer_name(other)) == ("rmsprop", "sgd")


def test_one_that_was_dropped_for_another_is_not_found_although_it_is_not_collected_yet():
    model = nn.Linear(2, 2)
    dropped: list = [torch.optim.AdamW(model.parameters())]
    dropped.append(dropped)  # a cycle, as a scheduler's wrapper of `step` makes
    gc.disable()
    try:
        del dropped
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert optimizer_of(list(model.parameters())) == [optimizer]
    finally:
        gc.enable()


def test_a_class_of_its_own_is_known_by_what_it_derives_from_or_not_at_all():
    class Mine(torch.optim.AdamW):
        pass

    weights = [nn.Parameter(torch.ones(3))]
    assert optimizer_name(Mine(weights)) == "adamw" and optimizer_name(torch.optim.Rprop(weights)) is None
    assert optimizer_name(torch.optim.SGD(weights, lr=0.1, momentum=0.5)) == "sgd_momentum"


def test_a_wrapper_of_an_optimizer_is_not_another():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inside: torch.optim.Optimizer) -> None:
            self.inside = inside

        @property
        def param_groups(self) -> list:
            return self.inside.param_groups

    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    wrapper = Wrapper(torch.optim.SGD(weights, lr=0.1))
    found = optimizer_of(weights[:1])
    assert len(found) == 2 and found[0] is wrapper.inside and found[1] is wrapper
    assert len(held_by(found)) == 2, "each once"

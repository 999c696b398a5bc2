"""Custom autograd Functions in all forms and places (`tests/scripts/functions.py`): a use for each form in each place.

The tests run some forms, each in one place; `python -m tests.scripts.table_of_functions` all of them on all meshes, and
plans them.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.scripts.functions import FORMS, PLACES, WIDTH, Net
from tests.scripts.models import adamw, inputs, targets
from tests.scripts.use import Script, use

IN_TESTS = ("plain", "twice", "in_place_forward", "mark_dirty", "several_outputs", "arguments_that_are_no_tensors",
            "saves_its_output", "differentiable_once", "backward_begins_without_gradient", "draws_a_mask")


def _trains(form: str, place: str) -> Callable[[Script], Any]:
    def run(hp: Script) -> Any:
        model = Net(form, place)
        call, optimizer, seen = hp.compile(model), adamw(model), []
        for number in range(2):
            loss = call(inputs().roll(number, 0), targets(width=WIDTH))
            loss.backward()
            seen.append((loss, {name: p.grad for name, p in model.named_parameters()}))
            optimizer.step()
            optimizer.zero_grad()
        return seen, model, optimizer

    run.__name__ = f"{form}_{place}"
    return run


for _form in FORMS:
    for _number, _place in enumerate(PLACES):
        _run = _trains(_form, _place)
        # Meshes and places are five each: after five forms, places go on by one, so that these meet other meshes.
        _turn = IN_TESTS.index(_form) * 6 // 5 % len(PLACES) if _form in IN_TESTS else -1
        globals()[_run.__name__] = use(_run, in_tests=_turn == _number)

"""A graph that one rank alone cannot compile -> all ranks hear so at once, and compile it again where that is mended."""
from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import nn

from hpml_compiler.compile.decide import graph_decisions
from hpml_compiler.compile.lower.lowering import Lowering
from hpml_compiler.runtime.consistency.rank_sync import CompiledTogether
from hpml_compiler.session import session
from tests.hpml_compiler.runtime.common import full

SOON_S = 20  # the time limit of collectives is 30 s, and a rank that does something else is never late
HALVES = {
    "forward": (Lowering, "forward", "rank 1 could not compile graph_0: ValueError: broken on purpose"),
    "backward": (Lowering, "backward", "rank 1 could not compile backward of graph_0: ValueError: broken on purpose"),
    "evaluation": (Lowering, "inference", "rank 1 could not compile graph_0: ValueError: broken on purpose"),
    "rewriting": (graph_decisions, "after_planning", "rank 1 could not compile graph_0: ValueError: broken on purpose"),
}


def broken(*_, **__):
    raise ValueError("broken on purpose")


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def step(call, model, trains):
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    with torch.set_grad_enabled(trains):
        loss = call(x).square().mean()
    if trains:
        model.zero_grad()
        loss.backward()
        return [loss.detach(), *(full(p.grad) for p in model.parameters())]
    return [loss]


def failing_once(rank, half, options):
    where, name, _ = HALVES[half]
    trains = half != "evaluation"
    expected = step(plain := small(), plain, trains)
    call = torch.compile(model := small(), backend="hpml", options={"compiler": "eager", **options})
    whole = getattr(where, name)
    if rank == 1:
        setattr(where, name, broken)
    start = time.monotonic()
    with pytest.raises(Exception) as raised:
        step(call, model, trains)
    seconds = time.monotonic() - start
    setattr(where, name, whole)
    for _ in range(2):
        torch.testing.assert_close(step(call, model, trains), expected)
    named = [graph.name for graph in session.last_plan().graphs] if session.current().graphs else []
    return str(raised.value), seconds, named


@pytest.mark.parametrize("half", HALVES)
def test_all_ranks_hear_of_it_at_once(launch, half):
    (theirs, seconds, graphs), (own, own_s, _) = launch(failing_once, 2, (half, {}))
    assert HALVES[half][2] in theirs
    assert "broken on purpose" in own and "rank 1 could not" not in own
    assert max(seconds, own_s) < SOON_S
    assert graphs == ["graph_0"], "what did not run is not in the plan"


def test_so_do_ranks_of_a_pipeline_where_a_graph_has_no_stages(launch):
    (theirs, seconds, _), (own, _, _) = launch(failing_once, 2, ("evaluation", {"mesh": {"pp": 2}}))
    assert "rank 1 could not compile graph_0: ValueError: broken on purpose" in theirs
    assert "broken on purpose" in own and seconds < SOON_S


def passed_over(rank):
    """As AOTAutograd does where forward saves sizes: an error of backward, asked for with forward, is only logged."""
    together = CompiledTogether("graph_0")
    together.agreed = True

    def compile_both():
        with contextlib.suppress(ValueError):
            return together.backward(broken if rank == 1 else lambda: "backward")

    with pytest.raises(Exception) as raised:
        together.compile_all(compile_both)
    return str(raised.value).splitlines()[0]


def test_an_error_of_backward_that_is_passed_over_is_told_with_forward(launch):
    told, own = launch(passed_over, 2)
    assert told == "rank 1 could not compile graph_0: ValueError: broken on purpose" and own == "broken on purpose"


def given_more_microbatches(rank):
    options = {"compiler": "eager", "mesh": {"pp": 2}, "microbatches": 2 + 2 * rank}
    call = torch.compile(small(), backend="hpml", options=options)
    with pytest.raises(Exception, match="rank 1 was given 4, rank 0 2"):
        call(torch.ones(4, 8))


def test_ranks_with_other_options_are_refused(launch):
    launch(given_more_microbatches, 2)


def refused_by_both_stages(rank):
    """The least budget that the ranks name, and what happens below it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)), nn.Linear(64, 512))

    def train(budget):
        torch._dynamo.reset()
        options = {"compiler": "eager", "mesh": {"pp": 2}, "microbatches": 2, "memory_budget": budget, "outputs": "whole"}
        return torch.compile(model, backend="hpml", options=options)(torch.ones(64, 64)).sum()  # never part of the step

    with pytest.raises(Exception) as raised:
        train(1)
    least = raised.value.inner_exception.smallest_budget_bytes
    train(int(least)).backward()
    return least


def test_a_budget_that_no_stage_meets_is_refused_with_what_all_stages_need(launch):
    one, other = launch(refused_by_both_stages, 2)
    assert one == other

"""A step that was interrupted: whether the state before it is still there, and ranks that are a step behind take another's."""
from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import hpml_compiler
from hpml_compiler.elastic.attempts import _Run
from hpml_compiler.elastic.kept_state import KeptState


class _Training:
    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.checkpointer = hpml_compiler.Checkpointer(folder, self.model, self.optimizer, scheduler=self.scheduler)

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().sum().backward()

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> list[torch.Tensor]:
        moments = [each[key].clone() for each in self.optimizer.state.values() for key in ("step", "exp_avg", "exp_avg_sq")]
        rate = torch.tensor(self.scheduler.get_last_lr())
        return [*(each.clone() for each in self.model.state_dict().values()), *moments, rate,
                torch.get_rng_state()]


def test_what_a_step_has_changed(tmp_path: Path) -> None:
    run = _Training(str(tmp_path))
    run.step()
    before, kept = run.state(), KeptState(run.checkpointer.run_state, 1)
    run.forward_and_backward()  # changes BatchNorm's buffers and draws a mask
    assert kept.is_there()
    assert any(not torch.equal(a, b) for a, b in zip(before, run.state(), strict=True))
    kept.held([kept.step.own]).restore(run.checkpointer.run_state)
    _assert_equal(run.state(), before)

    kept.close()
    for change in (run.optimizer.step, lambda: nn.init.zeros_(run.model[0].weight),
                   lambda: run.optimizer.state[run.model[0].weight]["exp_avg"].zero_()):
        kept = KeptState(run.checkpointer.run_state, 1)
        assert kept.is_there()
        change()
        assert not kept.is_there()
        kept.close()
    run.checkpointer.close()


def test_ranks_take_the_latest_whole_state(launch, tmp_path: Path) -> None:
    both = launch(_in_different_steps, 2, (str(tmp_path),))
    (done, source, before, after), (other_done, _, _, other_after) = both
    assert done == other_done == 2 and source == "memory"
    _assert_equal(after, before)
    _assert_equal(other_after, before)


def _in_different_steps(rank: int, folder: str) -> tuple[int, str, list[torch.Tensor], list[torch.Tensor]]:
    """Rank 0 has completed step 1 and is in backward; rank 1 is in the middle of the optimizer's step 1."""
    training = _Training(folder)
    run = _Run(training.checkpointer, None)
    training.step()
    run.kept = KeptState(training.checkpointer.run_state, 1)
    if rank == 0:
        training.step()
        run.kept = KeptState(training.checkpointer.run_state, 2)
    before = training.state()
    training.forward_and_backward()
    if rank == 1:
        training.optimizer.step()
    done, source = run._restored(run.kept.is_there())
    return done, source, before, training.state()


def _assert_equal(values: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for value, other in zip(values, expected, strict=True):
        assert torch.equal(value, other)

"""OUT STEPS PLACE OPTIONS [RANKS]: a run of three ranks, of which some (1) kill themselves at a place of step 5. Writes a line
per step."""
from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hpml_compiler

WIDTH, ROWS, KILLED_AT = 96, 1152, 5


class Elastic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias before the norm has gradients of rounding errors alone, which AdamW makes as large as others.
        self.first, self.norm, self.last = nn.Linear(16, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1),
                                                  nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.last(x), y)


class DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _die()
        return gradients


def _die() -> None:
    """End this process, or as HPML_TEST_HANGS says, stop it or loop for ever."""
    how = os.environ.get("HPML_TEST_HANGS")
    while how == "loops":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP if how else signal.SIGKILL)


def train(folder: Path, steps: int, place: str = "", options: dict[str, Any] | None = None, lost: str = "1") -> None:
    member, dies = os.environ.get("HPML_ELASTIC_ID", "0"), os.environ.get("HPML_ELASTIC_ID", "none") in lost.split(",")
    torch.manual_seed(0)
    model = Elastic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    call = model if options is None else torch.compile(model, backend="hpml", options=options)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(4 * ROWS, 16, generator=drawn), torch.randint(0, 8, (4 * ROWS,), generator=drawn))
    loader = hpml_compiler.distribute(DataLoader(data, ROWS, shuffle=True))
    if dies and place == "optimizer":
        optimizer.register_step_post_hook(lambda *_: _die() if scheduler.last_epoch == KILLED_AT else None)
    checkpointer = hpml_compiler.Checkpointer(folder / f"checkpoints{'' if options else '_alone'}", model, optimizer,
                                              scheduler=scheduler, loader=loader, every=3)
    with open(folder / f"losses{member if options else '_alone'}", "a", buffering=1) as file:
        for attempt in hpml_compiler.attempts(checkpointer, steps):
            with attempt as step:
                optimizer.zero_grad()
                dies_now = dies and step == KILLED_AT
                if dies_now and place == "forward":
                    _die()
                loss = call(*attempt.batch())
                loss = DiesInBackward.apply(loss) if dies_now and place == "backward" else loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                ranks = int(os.environ.get("WORLD_SIZE", "1"))
                time.sleep(0.5 if place == "optimizer" and ranks == 2 else 0.0)  # another rank is about to join
                file.write(json.dumps([step, loss.item(), os.getpid(), ranks, time.time()]) + "\n")
    checkpointer.close()
    whole = hpml_compiler.full_state_dict(model)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(whole, folder / f"model{'' if options else '_alone'}.pt")


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), *sys.argv[5:])

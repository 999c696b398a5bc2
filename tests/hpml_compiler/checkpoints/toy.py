"""A small run with everything that a checkpoint has: dropout, AdamW, a scheduler, a GradScaler, shuffled data."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hpml_compiler
from hpml_compiler.session import session

BATCHES = 8
"""Batches of a pass."""


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.last(x), y)


class Run:
    """One run in a folder; every random number of it comes from the seed, until it is resumed."""

    def __init__(self, folder: str, options: dict[str, Any] | None = None, **arguments: Any) -> None:
        torch._dynamo.reset()
        session.reset()
        torch.manual_seed(0)
        self.model = Blocks().double()
        self.call = self.model if options is None else torch.compile(
            self.model, backend="hpml", options={"compiler": "eager", **options})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        drawn = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(8 * BATCHES, 16, generator=drawn, dtype=torch.float64),
                             torch.randint(0, 8, (8 * BATCHES,), generator=drawn))
        self.loader = hpml_compiler.distribute(DataLoader(data, batch_size=8, shuffle=True))
        self.checkpointer = hpml_compiler.Checkpointer(folder, self.model, self.optimizer, scheduler=self.scheduler,
                                                       loader=self.loader, extra={"scaler": self.scaler}, **arguments)
        self.start = self.checkpointer.resume()

    def train(self, until: int) -> list[float]:
        """Losses of the steps from where the run is, to `until`."""
        losses, k = [], self.start
        while k < until:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = self.call(x, y)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                losses.append(loss.item())
                self.checkpointer.step(k)
                k += 1
                if k == until:
                    break
        self.start = k
        return losses

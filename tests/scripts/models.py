"""Models and data that several families share. In the default dtype, which is float64 in a use."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def inputs(rows: int = 8, width: int = 16) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * width, dtype=torch.float64).view(rows, width).mul(7).sin()


def targets(rows: int = 8, width: int = 4) -> torch.Tensor:
    return torch.linspace(1, -1, rows * width, dtype=torch.float64).view(rows, width).mul(5).cos()


def classes(rows: int = 8, count: int = 4) -> torch.Tensor:
    return torch.arange(rows) * 3 % count


def tokens(rows: int = 4, length: int = 6, count: int = 16) -> torch.Tensor:
    return (torch.arange(rows * length) * 7 + 3).view(rows, length) % count


def mlp(width: int = 16, hidden: int = 32, outs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.Tanh(), nn.Linear(width, outs))


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    # A large eps: Adam's first step is the sign of the gradient, and the sign of a rounding error is any.
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4)


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def step(call: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = F.mse_loss(call(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(hp: Any, model: nn.Module, x: Any = None, y: Any = None, steps: int = 3, optimizer: Any = None) -> Any:
    """Some ordinary steps: losses, model and optimizer."""
    call = hp.compile(model)
    optimizer = optimizer or adamw(model)
    x = inputs() if x is None else x
    losses = [step(call, optimizer, x, targets() if y is None else y) for _ in range(steps)]
    return losses, model, optimizer

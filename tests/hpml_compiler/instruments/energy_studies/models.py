"""The small model of these tests, as a TARGET of the command line too."""
from __future__ import annotations

import torch
from torch import nn


def mlp() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1)), (torch.zeros(64, 256),)

"""A model that returns its loss alone, for plans of training steps whose other outputs nobody reads."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class LossOnly(nn.Module):
    """`model` without its other outputs, which every rank would have to gather: in place of an object with a `loss`, a
    mapping with "loss", or a tuple or list that begins with it. Raises TypeError for anything else."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        found = self.model(*arguments, **named)
        if isinstance(found, torch.Tensor):
            return found
        if isinstance(found, Mapping):
            return found["loss"]
        if isinstance(found, (tuple, list)):
            return found[0]
        if not hasattr(found, "loss"):
            raise TypeError(f"the model returned a {type(found).__name__} without a loss")
        return found.loss

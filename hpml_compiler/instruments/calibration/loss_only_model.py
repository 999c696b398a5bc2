"""Model wrapper that returns only the loss, for plans of training steps whose other outputs are not used."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class LossOnly(nn.Module):
    """Returns only the loss of a model, so that other outputs need not be gathered on every rank.

    The model returns the loss, an object with a `loss`, a mapping with "loss", or a tuple or list that begins with it. Raises
    TypeError for other outputs."""

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

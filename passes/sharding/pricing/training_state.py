"""What training keeps for a parameter besides the parameter."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingStateModel:
    """Bytes per byte of a trainable parameter that gradient and optimizer state take (AdamW: 1 and 2)."""

    gradient: float = 1.0
    optimizer: float = 2.0

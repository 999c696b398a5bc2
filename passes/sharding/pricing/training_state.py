"""Bytes of gradient and optimizer state per parameter."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingStateModel:
    """Bytes of gradient and optimizer state per byte of a trainable parameter (AdamW: 1 and 2)."""

    gradient: float = 1.0
    optimizer: float = 2.0

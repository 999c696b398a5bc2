"""Phases of a step."""
from __future__ import annotations

from typing import Literal

Phase = Literal["forward", "backward"]
FORWARD: Phase = "forward"
BACKWARD: Phase = "backward"

"""When in a step something is done."""
from __future__ import annotations

from typing import Literal

Phase = Literal["forward", "backward"]
"""Microbatches will add what is done before their loop, and after it."""
FORWARD: Phase = "forward"
BACKWARD: Phase = "backward"

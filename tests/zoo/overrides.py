"""What single architectures need besides small sizes, and those that are left out with the reason."""
from __future__ import annotations

from typing import Any

GIVEN: dict[str, dict[str, Any]] = {}
"""Arguments of a config."""
LEFT_OUT: dict[str, str] = {}
"""Architectures that are no case, with the reason."""

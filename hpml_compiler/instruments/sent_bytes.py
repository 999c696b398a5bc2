"""Bytes that functional collectives send, counted from their operands as they run."""
from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from passes import compat

SHARES = {"all_reduce": lambda n: 2 * (n - 1) / n, "reduce_scatter_tensor": lambda n: (n - 1) / n,
          "all_to_all_single": lambda n: (n - 1) / n, "all_gather_into_tensor": lambda n: n - 1,
          "all_gather_into_tensor_coalesced": lambda n: n - 1}
"""Fraction of the operand that a rank sends over a ring of n."""


class SentBytes(compat.DispatchMode):
    """Counts bytes by collective and dtype, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("_c10d_functional::").removesuffix(".default")
        if func.namespace == "_c10d_functional" and name in SHARES:
            ranks = compat.ranks_in(args[-1])
            for x in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                self.sent[name, x.dtype] += round(SHARES[name](ranks) * x.numel() * x.element_size())
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.sent.values())

"""The rows of a batch: how many there are, and a batch of the first few of them."""
from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from passes import compat
from passes.errors import BadInput


def batch_rows(batch: Any) -> int:
    """Rows of the global batch: the size of dim 0 that most of its tensors have; the first tensor's breaks a tie.

    Raises BadInput if no tensor has a dim.
    """
    sizes = Counter(leaf.shape[0] for leaf in compat.pytree.tree_leaves(batch)
                    if isinstance(leaf, torch.Tensor) and leaf.dim())
    if not sizes:
        raise BadInput("the batch has no tensor with rows", "batch", "give tensors whose dim 0 is the rows of the batch")
    return sizes.most_common(1)[0][0]


def first_rows(batch: Any, rows: int) -> Any:
    """The batch with `rows` of its rows: every tensor whose dim 0 has the size of the batch is cut, the rest is kept.

    Nothing is copied; tensors may be on the meta device.
    """
    total = batch_rows(batch)
    if not 1 <= rows <= total:
        raise BadInput(f"{rows} rows of a batch of {total}", "batch", f"take 1 to {total}")

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != total or rows == total:
            return leaf
        return leaf.detach()[:rows].requires_grad_(leaf.requires_grad)

    return compat.pytree.tree_map(cut, batch)

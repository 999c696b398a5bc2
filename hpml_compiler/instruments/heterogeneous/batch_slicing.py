"""Count and slice the rows of a batch."""
from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from passes import compat
from passes.errors import BadInput


def batch_rows(batch: Any) -> int:
    """Number of rows of the global batch: the most common size of dim 0; on a tie, the first tensor's.

    Raises BadInput if no tensor has a dim.
    """
    sizes = Counter(leaf.shape[0] for leaf in compat.pytree.tree_leaves(batch)
                    if isinstance(leaf, torch.Tensor) and leaf.dim())
    if not sizes:
        raise BadInput("the batch has no tensor with rows", "batch", "give tensors whose dim 0 is the rows of the batch")
    return sizes.most_common(1)[0][0]


def first_rows(batch: Any, rows: int) -> Any:
    """The first `rows` rows of a batch: tensors whose dim 0 is the number of rows are sliced, others stay.

    Tensors are not copied, and may be on the meta device.
    """
    total = batch_rows(batch)
    if not 1 <= rows <= total:
        raise BadInput(f"{rows} rows of a batch of {total}", "batch", f"take 1 to {total}")

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != total or rows == total:
            return leaf
        return leaf.detach()[:rows].requires_grad_(leaf.requires_grad)

    return compat.pytree.tree_map(cut, batch)

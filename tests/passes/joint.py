"""Joint graphs for tests: forward and backward of a model in one graph, as the backend gets them."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from passes import compat


class _Captured(Exception):
    """Raised by the partitioner once it has the joint graph: nothing is compiled or run."""


def joint_graph(
    model: nn.Module, batch: Mapping[str, Any] | tuple[Any, ...], dynamic: bool | None = None
) -> tuple[fx.GraphModule, int]:
    """The joint graph of `model(**batch)` (`model(*batch)` for a tuple), and how many of its outputs are forward's.

    dynamic: as in torch.compile; True makes sizes of inputs symbolic.
    """
    captured: list[tuple[fx.GraphModule, int]] = []

    def partition(joint: fx.GraphModule, inputs: object, *, num_fwd_outputs: int, **kwargs: object) -> None:
        captured.append((joint, num_fwd_outputs))
        raise _Captured

    backend = compat.aot_autograd(
        fw_compiler=lambda graph_module, _: graph_module,
        partition_fn=partition,
        decompositions=compat.inductor_decompositions(),
    )
    torch.compiler.reset()
    try:
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        compiled(**batch) if isinstance(batch, Mapping) else compiled(*batch)
    except Exception:
        if not captured:
            raise
    finally:
        torch.compiler.reset()
    return captured[0]

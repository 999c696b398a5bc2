"""Placed tensors in functions compiled by other backends of torch.compile: traced and run on whole tensors."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hpml_compiler.runtime.batch.batch_shard import BatchShard, write_back_views
from hpml_compiler.runtime.dtensor.op_dispatch import GatheredArguments, run_gathered
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, gathered_view
from passes import compat
from passes.errors import BadInput
from passes.graph.fx_nodes import memory_of


@functools.cache
def watch_backends() -> None:
    """Pass plain tensors in place of placed ones to backends other than hpml."""
    compat.unwrap_backend_inputs(PlacedTensor, _on_wholes)


def _on_wholes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled graph so that it takes placed tensors: in-place changes are written back, and gradients flow back."""

    def run(*args: Any) -> Any:
        for value in args:
            if isinstance(value, BatchShard):
                write_back_views(value)
        wholes = GatheredArguments()
        with compat.plain_torch_functions():
            result = run_gathered(compiled, args, {}, gathered_view, wholes)
            _check_apart(wholes)
        return result

    return run


def _check_apart(wholes: GatheredArguments) -> None:
    """Raises BadInput if the graph changed an argument that shares memory with another: it ran on separate copies."""
    for changed, value in wholes.changed:
        for other, its in wholes:
            # Parts without rows have no data pointer, so storages are compared; the result is the same on all ranks.
            same = other is not changed and memory_of(changed._local_tensor) == memory_of(other._local_tensor)
            if same and memory_of(value) != memory_of(its):
                raise BadInput("a function compiled by another backend than hpml mutates one of its arguments, and "
                               "another shares memory with it: it ran on separate full copies of both",
                               f"arguments of shape {tuple(changed.shape)} and {tuple(other.shape)}",
                               "pass only one of the two, or a clone() of the other")

"""Functions that other backends of torch.compile compile, given placed tensors: traced on whole tensors, and run on them."""
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
    """From now on, backends other than hpml get plain tensors in the place of placed ones."""
    compat.unwrap_backend_inputs(PlacedTensor, _on_wholes)


def _on_wholes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that takes placed tensors. They keep what it writes to their whole values, and gradients flow back."""

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
    """Raises BadInput if the graph has changed an argument with which another shares memory: it worked on copies."""
    for changed, value in wholes.changed:
        for other, its in wholes:
            # Parts without rows have no address, so it is the storage that tells, on all ranks alike.
            same = other is not changed and memory_of(changed._local_tensor) == memory_of(other._local_tensor)
            if same and memory_of(value) != memory_of(its):
                raise BadInput("a function compiled by another backend than hpml changes one of its arguments in place, and "
                               "another shares memory with it: it worked on whole copies of both",
                               f"arguments of shape {tuple(changed.shape)} and {tuple(other.shape)}",
                               "give it one of the two, or a clone() of the other")

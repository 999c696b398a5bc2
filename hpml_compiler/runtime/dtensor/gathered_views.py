"""Views of placed tensors that had to be gathered; writes to a view and to its base reach each other."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.dtensor.op_dispatch import VIEW_STEP, store_value
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from passes.graph.fx_nodes import memory_of


class ViewReplay:
    """Recipe of a gathered view: `replay` makes it from the full `source`."""

    __slots__ = ("_memory", "_version", "replay", "source")

    def __init__(self, source: DTensor, replay: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.source, self.replay = source, replay
        self._memory = self._root().untyped_storage()  # kept alive, so that no other tensor gets its address
        self.note_version()

    def _root(self) -> torch.Tensor:
        """This rank's part of the base tensor of the view."""
        source = self.source
        while (step := getattr(source, VIEW_STEP, None)) is not None:
            source = step.source
        return source._local_tensor

    def note_version(self) -> None:
        root = self._root()
        self._version = -1 if root.is_inference() else root._version

    @property
    def is_cut_off(self) -> bool:
        """True if the source was given other memory (`p.data = ...`), which detaches its views. Compares storages, not
        addresses: all ranks must agree, and empty parts have no address."""
        return memory_of(self._root()) != self._memory._cdata

    @property
    def is_current(self) -> bool:
        """True if the source has not changed since. All ranks do the same, so all get the same answer."""
        root = self._root()
        return not root.is_inference() and root._version == self._version

    def write(self, value: torch.Tensor) -> None:
        """Write the view's new value to the source."""
        source = to_full_tensor(self.source)
        self.replay(source).copy_(value)
        store_value(self.source, source)


def refresh(view: DTensor) -> None:
    """Update a gathered view from its source."""
    step: ViewReplay | None = getattr(view, VIEW_STEP, None)
    if step is None:
        return
    if step.is_cut_off:
        delattr(view, VIEW_STEP)
    elif not step.is_current:
        with torch.no_grad():
            refresh(step.source)
            view._local_tensor.copy_(step.replay(to_full_tensor(step.source)))
        step.note_version()


def strided_replay(view: torch.Tensor, whole_value: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that makes `view`, a strided view of a full value, from another full value."""
    shape, stride, offset = view.shape, view.stride(), view.storage_offset() - whole_value.storage_offset()
    if view.dtype is whole_value.dtype:
        return lambda other: other.as_strided(shape, stride, other.storage_offset() + offset)
    dtype, item = view.dtype, view.element_size()  # differs after `view_as_real` or `view(dtype)`
    first = view.storage_offset() * item - whole_value.storage_offset() * whole_value.element_size()
    return lambda other: other.new_empty(0, dtype=dtype).set_(
        other.untyped_storage(), (other.storage_offset() * other.element_size() + first) // item, shape, stride)

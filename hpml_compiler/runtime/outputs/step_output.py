"""Step output: an output of a compiled graph, or what the script made of it, while its step is noted or waited for."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpml_compiler.runtime.dtensor.op_dispatch import map_tensors, tensors_in
from hpml_compiler.runtime.outputs.call_modes import Modes
from hpml_compiler.runtime.outputs.recorded_output import (
    LIKES,
    RecordedOutput,
    asks_metadata,
    changes,
    on_the_way,
    plain,
    recordable_now,
    without_wrapper,
)
from hpml_compiler.runtime.outputs.step_calls import StepCalls
from passes import compat
from passes.errors import HpmlError

READS = frozenset(("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__repr__", "__format__", "equal",
                   "allclose", "is_nonzero"))
"""Functions that look at values, and at nothing else."""

MEMORY = frozenset(("untyped_storage", "storage", "data_ptr", "__dlpack__", "numpy", "__array__"))


class StepOutput(RecordedOutput):
    """The result of a graph or of a call on one. Before a call that is not noted, it becomes the plain tensor."""

    record: StepCalls

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        first = args[0] if args else None
        with compat.plain_torch_functions():
            if asks_metadata(func, name) and isinstance(first, StepOutput) and "value" not in vars(first):
                return func(*args, **kwargs)
            ours = [x for x in tensors_in((args, kwargs)) if isinstance(x, StepOutput) and "value" not in vars(x)]
        if not ours:
            return func(*map_tensors(plain, args), **map_tensors(plain, kwargs))
        if name in LIKES and isinstance(first, StepOutput) and len(tensors_in((args, kwargs))) == 1:
            return func(torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device), *args[1:],
                        **kwargs)
        record = ours[0].record
        for other in ours:
            if other.record is not record:
                other.record.value_for(f"{name} with an output of another call", ())
        args, named = map_tensors(_settled, args), map_tensors(_settled, kwargs)
        if recordable_now() and record.takes(Modes(ours[0].device.type)) and not record.is_closed:
            made = record.add(func, args, named, StepOutput)
            if made is not NotImplemented:
                return made
        return _not_noted(record, ours, func, name, args, named)


class _LikeDTensor(torch.Tensor):
    """Memory layout of a DTensor, without which torch cannot exchange an object for one."""

    __slots__ = ("_local_tensor", "_spec")


class ShardedStepOutput(StepOutput, _LikeDTensor):
    """A result of the graph that is sharded: this object becomes the sharded tensor."""


def step_output(record: Any, number: int) -> StepOutput:
    """A result of the graph, for the script."""
    return (ShardedStepOutput if number in record.memory.sharded else StepOutput)(record, number)


def _not_noted(record: StepCalls, ours: Sequence[StepOutput], func: Callable[..., Any], name: str, args: tuple,
               kwargs: dict[str, Any]) -> Any:
    record.memory.note_reads([x.number for x in ours])
    if compat.saving_is_hooked():
        record.unnoted = f"{name} takes its outputs under hooks of saved tensors, as torch.utils.checkpoint sets them"
    between = [x for x in on_the_way(name, args, kwargs) if isinstance(x, StepOutput)]
    for each in between:
        if "value" not in vars(each):
            each.record.read_between(each.number, name)
    alters = name not in MEMORY and changes(func, name, args, kwargs) or name == "__get__"
    if name in ("backward", "grad") and not alters and not between and len(ours) == 1 and not record.is_closed:
        record.starts_backward(ours[0].number)
    if not record.is_closed:
        detached = record.loss is None or name in READS or not torch.is_grad_enabled() or not any(
            x.requires_grad for x in ours)
        record.value_for(name, [x.number for x in ours] if detached and not alters else ())
    if record.is_closed:
        if any(isinstance(x, StepOutput) and "value" not in vars(x) for x in ours):
            raise HpmlError("an output of the compiled model was not computed: its call failed", name, "call the model again")
        return func(*map_tensors(plain, args), **map_tensors(plain, kwargs))
    values = {id(x): record.known[x.number] for x in ours}  # type: ignore[index]
    return func(*map_tensors(lambda x: values.get(id(x), x), args), **map_tensors(lambda x: values.get(id(x), x), kwargs))


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """An operand as the record takes it: results of other records are computed."""
    if isinstance(tensor, StepOutput) and "value" not in vars(tensor):
        return tensor
    if isinstance(tensor, RecordedOutput):
        tensor.read()
    return without_wrapper(tensor)

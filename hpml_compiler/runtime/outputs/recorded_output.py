"""Recorded output: a large result of what a script called on sharded outputs, which no rank has computed yet."""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpml_compiler.runtime.dtensor.dispatch_table import in_place
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.dtensor.op_dispatch import map_tensors, tensors_in
from hpml_compiler.runtime.outputs.call_modes import Modes, is_unread, nbytes
from hpml_compiler.runtime.outputs.deferred_output import DESCRIPTION, QUESTIONS, DeferredOutput, read_for_dynamo
from hpml_compiler.runtime.outputs.record import SMALL_BYTES, AllRecords, CallRecord
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from passes import compat
from passes.errors import HpmlError
from passes.session_state import state_of

_CHANGING = frozenset(("retain_grad", "register_hook", "register_post_accumulate_grad_hook", "untyped_storage", "storage",
                       "data_ptr", "__dlpack__", "__setitem__", "requires_grad_", "numpy", "__array__", "set_"))
"""Uses for which it must be a tensor like any other: with a place among the gradients, or memory that it shares."""
LIKES = frozenset(("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
                    "new_full", "new_empty", "new_tensor"))
"""Functions that need the shape alone."""


class RecordedOutput(DeferredOutput):
    """The result of a recorded call. record: has the call. number: of the result in it."""

    record: CallRecord
    number: int
    record_of_calls = True  # by which other classes of tensors know this one
    is_output: bool
    """True for an output of a graph: what is called on it is not added to its record, but recorded on the sharded tensor that
    it is computed to first."""

    @staticmethod
    def __new__(cls, record: CallRecord, number: int) -> Any:
        fake = record.values[number].fake
        with compat.plain_torch_functions(), torch.inference_mode(False):
            if fake.requires_grad:
                with torch.enable_grad():
                    made: Any = _NotComputed.apply(_leaf(), cls, fake)
            else:
                made = _wrapper(cls, fake)
        made.record, made.number, made.is_output = record, number, False
        return made

    def read(self, as_today: bool = False) -> None:
        if "value" not in vars(self):
            self.record.read(self.number, as_today)

    def read_by_dynamo(self) -> None:
        """Read it for a compiled function. In later steps, the call that makes it computes it at once."""
        self.record.stop(self.number)
        self.read()
        if isinstance(self, RecordedOutput) and "value" in vars(self):  # sharded, as the call returns it from then on
            full = to_full_tensor(vars(self).pop("value"))
            with torch.set_grad_enabled(full.requires_grad):  # the sharded output holds `full`, and would hold this object
                self.become(full.view_as(full))

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        if asks_metadata(func, name) and isinstance(first, RecordedOutput) and "value" not in vars(first):
            with compat.plain_torch_functions():
                return func(*args, **kwargs)
        with compat.plain_torch_functions():
            outputs = [x for x in tensors_in((args, kwargs)) if isinstance(x, RecordedOutput) and x.is_output]
        if outputs and name != "detach":
            for each in outputs:
                each.read()
            return func(*map_tensors(plain, args), **map_tensors(plain, kwargs))
        made = recorded(func, name, args, kwargs)
        if made is not NotImplemented:
            if outputs and isinstance(made, RecordedOutput):
                made.is_output = True
            return made
        with compat.plain_torch_functions():
            operands = tensors_in((args, kwargs))
        before_use(func, name, args, kwargs, operands)
        return func(*map_tensors(plain, args), **map_tensors(plain, kwargs))


def _wrapper(kind: type, fake: torch.Tensor) -> Any:
    return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        kind, fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


class _NotComputed(torch.autograd.Function):
    """Stands for the calls that make a recorded output. A backward that reaches it was not noticed in time."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, kind: type, fake: torch.Tensor) -> torch.Tensor:
        return _wrapper(kind, fake)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise HpmlError("a gradient arrives at a result of an output of the compiled model that is not computed yet",
                        f"a tensor of shape {tuple(gradient.shape)}",
                        'use the result in a torch operation first, as in result = result.clone(), or set outputs="whole"')


@functools.cache
def _leaf() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that stands behind a result that was computed; others as they are."""
    return vars(tensor).get("value", tensor) if isinstance(tensor, RecordedOutput) else tensor


def value_of(value: Any) -> Any:
    """The value of a recorded output, for what takes tensors without `__torch_function__`; other objects as they are."""
    if isinstance(value, RecordedOutput) and "record" in vars(value):
        value.read(as_today=True)
        return plain(value)
    return value


def whole_for(value: Any, function: Any) -> Any:
    """A sharded output as the full tensor for an autograd function of others, which would give it a gradient that is not
    sharded, as those of other uses are; other objects as they are. function: its class."""
    ours = function is None or function.__module__.startswith(("hpml_compiler.", "passes."))
    if ours or not isinstance(value, LazyOutput) or "shared" not in vars(value):
        return value
    return value if compat.is_tracing() or compat.is_fake(value._local_tensor) else value.used()


@functools.cache
def watch_autograd() -> None:
    """Compute recorded outputs that autograd, an autograd function or a compiled function is about to take."""
    compat.convert_before_autograd(compat.untraced, (RecordedOutput, LazyOutput), value_of, whole_for)
    compat.trace_after(DeferredOutput, read_for_dynamo)


def changes(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if a call needs its operands as they are on one device: to write to them, for their memory or their hooks, or for
    gradients between them."""
    if name in _CHANGING or in_place(name) or kwargs.get("out") is not None:
        return True
    if name == "__get__":
        return func.__self__.__name__ in ("data", "grad", "grad_fn", "_base")  # type: ignore[attr-defined]
    if name not in ("backward", "grad"):
        return False
    return bool(kwargs.get("create_graph", args[name == "grad" and 4 or 3:][:1] == (True,)))


def on_the_way(name: str, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Operands that need a place among the gradients: with hooks, or whose gradients are asked for."""
    if name in ("retain_grad", "register_hook"):
        return [args[0]]
    if name in ("backward", "grad"):
        return tensors_in((kwargs.get("inputs", args[1:2] if name == "grad" else args[4:5]),))
    return []


def before_use(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> None:
    """Compute what a call that is not recorded reads, and what must not see what it, or a view that it returns, may change."""
    living = state_of(AllRecords).living
    as_today = bool(living) and changes(func, name, args, kwargs)
    for each in on_the_way(name, args, kwargs):
        if isinstance(each, RecordedOutput) and "value" not in vars(each):
            each.record.read_between(each.number, name)
    for each in operands:
        if isinstance(each, RecordedOutput):
            each.read(as_today)
    states = [vars(x)["shared"] for x in operands if "shared" in vars(x)] if living else []
    for record in list(living):
        if as_today or any(record.uses(shared) for shared in states):
            record.read_all()


def recordable_now() -> bool:
    """True where calls may run later than they are made."""
    return not (compat.inside_transform() or compat.inside_backward() or compat.dispatch_is_watched() or compat.is_tracing()
                or torch.is_inference_mode_enabled() or compat.inside_autograd_function() or compat.saving_is_hooked())


def asks_metadata(func: Any, name: str) -> bool:
    """True if a call asks for what is known of a result without its values."""
    return name in QUESTIONS or name == "__get__" and func.__self__.__name__ in DESCRIPTION


def without_wrapper(tensor: torch.Tensor) -> torch.Tensor:
    """A computed result, or an output that was gathered, as the plain tensor."""
    made: Any = plain(tensor)
    return made.used() if not is_unread(made) and "shared" in vars(made) else made


def recorded(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Offer a call with a sharded or recorded operand to the record. NotImplemented if it runs as today."""
    if not recordable_now():
        return NotImplemented
    with compat.plain_torch_functions():
        operands = tensors_in((args, kwargs))
        ours = [x for x in operands if isinstance(x, RecordedOutput) and "value" not in vars(x)]
        unread = [x for x in operands if is_unread(x)]
    if not ours and not any(nbytes(x) > SMALL_BYTES and vars(x)["shared"].recorder for x in unread):
        return NotImplemented
    if name in LIKES and operands == [args[0]]:
        return func(torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device=args[0].device),
                    *args[1:], **kwargs)
    if ours:
        record = ours[0].record
        if not record.takes(Modes(ours[0].device.type)):
            return NotImplemented
    else:
        chosen: Any = next(x for x in unread if vars(x)["shared"].recorder)
        if vars(chosen)["shared"].thread is not threading.current_thread():
            return NotImplemented
        record = state_of(AllRecords).record_for(chosen)

    def operand(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, RecordedOutput) and vars(tensor)["record"] is not record:
            tensor.read()
        return without_wrapper(tensor)

    return record.add(func, map_tensors(operand, args), map_tensors(operand, kwargs), RecordedOutput)


@dataclass(frozen=True)
class OutputRecorder:
    """Records calls on the outputs of one graph. compile_options: those of graphs that are compiled for them, as JSON."""

    compile_options: str

    @staticmethod
    def recorded(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        return recorded(func, name, args, kwargs)

    @staticmethod
    def before_use(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any],
                   operands: list[torch.Tensor]) -> None:
        before_use(func, name, args, kwargs, operands)

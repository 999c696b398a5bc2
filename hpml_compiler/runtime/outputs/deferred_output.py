"""Deferred output: a result of a compiled graph that is computed when the script first reads it.

Until then it answers for its shape, dtype and device; any other use makes it the plain tensor that eager code would have, in
the same Python object.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from passes import compat
from passes.errors import HpmlError

DESCRIPTION = frozenset(("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_cuda", "is_cpu", "is_sparse",
                          "is_quantized", "is_meta", "is_nested", "is_mkldnn", "is_mps", "is_xpu", "itemsize", "nbytes",
                          "names"))
"""Attributes that are known without the values."""
QUESTIONS = frozenset(("dim", "ndimension", "size", "stride", "numel", "nelement", "element_size", "is_floating_point",
                        "is_complex", "is_signed", "get_device", "is_contiguous", "storage_offset", "__len__", "__hash__"))
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


class DeferredCall:
    """Outputs of one call that are not computed yet. compute: returns them, under autograd, and raises an error if what it
    needs has changed. stop: called where outputs of later calls should be computed at once. Threads that read at the same time
    compute once."""

    def __init__(self, compute: Callable[[], Sequence[torch.Tensor]], stop: Callable[[], None]) -> None:
        self._compute: Callable[[], Sequence[torch.Tensor]] | None = compute
        self.stop = stop
        self._lock = threading.Lock()
        self._values: list[Any] = []
        self._shared: list[torch.Tensor] = []

    def value(self, position: int, detached: bool) -> torch.Tensor:
        """An output: with its gradient once, and detached any number of times; all share memory."""
        with self._lock:
            if self._compute is not None:
                with (compat.outside_transforms(), compat.saving_without_hooks(), torch.inference_mode(False),
                      torch.enable_grad()):
                    for value in self._compute():  # a cast that changes nothing returns its operand: the same object twice
                        self._values.append(value.view_as(value) if any(value is x for x in self._values) else value)
                self._shared = [x.detach() for x in self._values]
                self._compute = None
            if detached or self._values[position] is None:
                return self._shared[position].detach()
            value, self._values[position] = self._values[position], None
            return value


class DeferredOutput(torch.Tensor):
    """One of a call's outputs, or a detached copy of it."""

    call: DeferredCall
    position: int
    detached: bool
    value: torch.Tensor
    use: Any

    @staticmethod
    def __new__(cls, like: torch.Tensor, shape: Sequence[int], stride: Sequence[int], call: DeferredCall, position: int,
                detached: bool = False, use: Any = None) -> Any:
        """like: a tensor, possibly a fake, of the same dtype and device, that requires a gradient if the output does. use:
        counts its reads."""
        made: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, shape, stride, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad and not detached)
        made.call, made.position, made.detached, made.use = call, position, detached, use
        return made

    def read(self) -> None:
        """Become the plain tensor with the values. While a weak reference to this object exists, torch cannot exchange the two:
        then this object stands for the tensor in every call."""
        if self.use is not None:
            self.use.note_read()
        self.become(self.call.value(self.position, self.detached))

    def become(self, value: torch.Tensor, exchange: bool = True) -> None:
        """exchange: False where something else holds `value`, which would hold this object then."""
        # TypeError: classes of other slots. HpmlError: torch asks for the autograd node of an object that others hold.
        with compat.plain_torch_functions(), contextlib.suppress(RuntimeError, TypeError, HpmlError):
            if exchange:
                torch.utils.swap_tensors(self, value)
                return
        self.value = value

    def read_by_dynamo(self) -> None:
        """Read the output for a compiled function. Dynamo compiles a function again for a tensor of another class, so later
        calls of the model return plain tensors."""
        self.call.stop()
        self.read()

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with compat.plain_torch_functions():
            first = args[0] if args else None
            if isinstance(first, DeferredOutput) and "value" not in vars(first):
                if name == "__get__" and func.__self__.__name__ in DESCRIPTION or name in QUESTIONS:
                    return func(*args, **kwargs)
                if name == "detach":
                    return DeferredOutput(first, first.shape, first.stride(), first.call, first.position, True, first.use)
                if _CASTS.get(name) is first.dtype and len(args) == 1 and not kwargs:
                    return first
            plain_args, plain_kwargs = compat.pytree.tree_map_only(DeferredOutput, _plain, (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise HpmlError("an output of the compiled model is not computed yet, and this call does not ask for it", str(func),
                        'use the output in a torch operation first, as in output = output.clone(), or set outputs="whole"')


def _plain(output: DeferredOutput) -> torch.Tensor:
    if "value" not in vars(output):
        output.read()
    return vars(output).get("value", output)


def read_for_dynamo(output: DeferredOutput) -> None:
    """Read an output, as its class does, for a compiled function."""
    output.read_by_dynamo()


@functools.cache
def watch_deferred() -> None:
    """Compute outputs that autograd, an autograd function (as `torch.utils.checkpoint` may be) or a compiled function is about
    to take: these do not call `__torch_function__`."""
    compat.convert_before_autograd(compat.untraced, (DeferredOutput,),
                                   lambda x: _plain(x) if type(x) is DeferredOutput else x)
    compat.trace_after(DeferredOutput, read_for_dynamo)

"""Outputs of a compiled graph other than the loss: sharded as computed, gathered at first use."""
from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from hpml_compiler.runtime.consistency.input_check import InputCheck
from hpml_compiler.runtime.dtensor.dispatch_table import COMPUTED_ATTRIBUTES, KEEPS_ROWS, MEMORY, METADATA
from hpml_compiler.runtime.dtensor.local_dispatch import wrap
from hpml_compiler.runtime.dtensor.op_dispatch import adopt, map_tensors, tensors_in
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, name_slots
from hpml_compiler.runtime.placements.gather_parts import gathered_from_parts
from hpml_compiler.runtime.placements.placed_gradient import LocalPart, placed_gradient
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.placements.single_rank_placement import is_owned
from hpml_compiler.runtime.watchdog.activity_scope import activity
from hpml_compiler.runtime.watchdog.barrier_check import require_all_ranks
from passes import compat
from passes.errors import HpmlError

OF_THE_WRAPPER = METADATA - {
    "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "backward", "detach_",
    "data_ptr"}
HOOKS = ("register_hook", "retain_grad")
READING = ("this output of the model is sharded, and its first use gathers it from all ranks: move that use out of "
           "`if rank == 0:`, and print or save the result on rank 0")


class OutputState:
    """State shared by an output and its detached copies: a description and, after the first use of any of them, the full
    tensor, without a gradient. recorder: records calls on it; None where they gather it. maker: what makes later calls of
    its graph wait for the loss. use: notes what the script does with it."""

    __slots__ = ("data", "gradient", "looked_at", "maker", "recorder", "thread", "use", "what")

    def __init__(self, what: str, gradient: InputCheck | None, recorder: Any = None, maker: Any = None,
                 use: Any = None) -> None:
        self.what, self.gradient, self.thread, self.recorder = what, gradient, threading.current_thread(), recorder
        self.maker, self.use = maker, use
        self.data: torch.Tensor | None = None
        self.looked_at: torch.Tensor | None = None

    def full_tensor(self, part: torch.Tensor, spec: Any) -> torch.Tensor:
        if self.data is None:
            self.data = self.look(part, spec)
        return self.data

    def look(self, part: torch.Tensor, spec: Any) -> torch.Tensor:
        """The full tensor for calls that only read it: the output stays sharded."""
        if self.looked_at is None:
            self.looked_at = self._gather(part, spec)
        return self.looked_at

    def _gather(self, part: torch.Tensor, spec: Any) -> torch.Tensor:
        what = f"reading {self.what}"
        if self.thread is not threading.current_thread() and self.thread.is_alive() and not compat.inside_backward():
            raise HpmlError(f"{what} for the first time in another thread than the one that called the model: it is gathered "
                            "from all ranks, which threads would do at different times", threading.current_thread().name,
                            "use it where the model is called first (as in logits = logits.numpy()), and pass the result on")
        require_all_ranks(what, READING, every=0)
        if self.use is not None:
            self.use.note_gather(spec.tensor_meta)
        with activity(what), torch.inference_mode(False), torch.no_grad():
            return gathered_from_parts(part, spec)


class LazyOutput(PlacedTensor):
    """Sharded result of a compiled graph, gathered at its first use.

    Detached or cast, it stays sharded. Any other use gathers it, on all ranks together, and from then on it acts as the
    full tensor: writes to it, or to views of it, are visible everywhere. Gradients flow to the local part.
    A use on one rank alone raises an error (`require_all_ranks`).
    """

    __slots__ = ()

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if len(types) > 1 and any(hasattr(kind, "record_of_calls") for kind in types):
            return NotImplemented  # that class records the call, or computes its operands
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch.autograd.grad or func is torch.autograd.backward and kwargs.get("inputs") is not None:
            return _gradients_of(func, *args, **kwargs)
        first = args[0] if args else None
        with compat.plain_torch_functions():
            operands = tensors_in((args, kwargs))
            if any(isinstance(t, DTensor) and compat.is_fake(t._local_tensor) for t in operands):
                return super().__torch_function__(func, types, args, kwargs)
            output = first if isinstance(first, LazyOutput) else None
            in_parts = output is not None and not output.is_whole
            if output is not None and output.is_of_autograd and (
                    name in HOOKS or name in ("__get__", "__set__") and func.__self__.__name__ == "grad"):
                return _on_gradient(func, name, *args, **kwargs)
            attribute = name == "__get__" and func.__self__.__name__ not in COMPUTED_ATTRIBUTES
            if in_parts and (attribute or name in OF_THE_WRAPPER):
                return func(*args, **kwargs)
            if output is not None and in_parts and name == "__get__" and compat.is_tracing():
                # Dynamo computes `x.T` to look up a method of it, after it has noted the sizes of the parts.
                return func(torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device="meta"))
            if output is not None and (attribute or name in METADATA | MEMORY) and compat.is_tracing():
                return func(*args, **kwargs)  # for a fake of the wrapper, whose memory is not that of its local part
            if output is not None and in_parts and name in KEEPS_ROWS and len(operands) == 1:
                kept = output.kept(func, name, args[1:], kwargs)
                if kept is not None:
                    return kept
            if output is not None and name == "detach" and "shared" in vars(output):
                return output.detached(func)
        recorder = next((vars(x)["shared"].recorder for x in operands if "shared" in vars(x)), None)
        if recorder is not None:
            made = recorder.recorded(func, name, args, kwargs)
            if made is not NotImplemented:
                return made
            recorder.before_use(func, name, args, kwargs, operands)
        with compat.plain_torch_functions():
            used = [(operand, operand.used()) for operand in operands if isinstance(operand, LazyOutput)]
        values = {id(output): value for output, value in used}
        result = func(*map_tensors(lambda t: values.get(id(t), t), args), **map_tensors(lambda t: values.get(id(t), t), kwargs))
        with compat.plain_torch_functions():
            for each, value in used:
                if value.requires_grad and not each.requires_grad:  # changed in place
                    each.requires_grad_()
        return next((output for output, value in used if value is result), result)

    @property
    def is_of_autograd(self) -> bool:
        """True if this wrapper is what autograd knows the output by. The full tensor is made of it; once that is changed in
        place, hooks and gradients are those of the changed tensor."""
        own = vars(self)
        return self.requires_grad and ("value" not in own or own["node"] is not None and own["value"].grad_fn is own["node"])

    @property
    def is_whole(self) -> bool:
        """True if this output, or the one it was detached from, has been gathered."""
        shared = vars(self).get("shared")
        return shared is not None and shared.data is not None

    def kept(self, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> LazyOutput | None:
        """A cast, copy or detach of a sharded output that stays sharded; None if it needs the full tensor."""
        part, shared = vars(self)["part"], vars(self)["shared"]
        if is_owned(self._spec.placements) and name != "detach":  # its strides tell other ranks nothing
            return None
        if self.requires_grad and name != "detach" and torch.is_grad_enabled():
            part = LocalPart.apply(self, self._spec, PlacedTensor)  # for gradients at this output
        made = func(part, *args, **kwargs)
        if made is part:
            return self
        if made.device != part.device or made.stride() != part.stride() or made.is_pinned() != part.is_pinned():
            return None
        shared = shared if name == "detach" else OutputState(
            shared.what, shared.gradient, shared.recorder, shared.maker, shared.use)
        return lazy_output(made, _spec_like(self._spec, made), shared)

    def detached(self, func: Callable[..., Any]) -> LazyOutput:
        """Detach of a gathered output; still an output, as when it is sharded."""
        value = func(self.used())
        result: Any = compat.make_dtensor(LazyOutput, self._local_tensor, self._spec)
        vars(result).update(shared=vars(self)["shared"], spec=vars(self)["spec"], value=value, node=None)
        return result

    def used(self) -> torch.Tensor:
        """The full tensor: always the same object, with a gradient if the part has one, even under no_grad."""
        own = vars(self)
        if "value" in own:
            return own["value"]
        if "shared" not in own:  # made by another compiler
            return to_full_tensor(compat.make_dtensor(PlacedTensor, self._local_tensor, self._spec))
        shared, part, spec = own["shared"], own["part"], own["spec"]
        with compat.outside_transforms():
            data = shared.full_tensor(self._local_tensor, spec)
            if self._local_tensor is not data:  # for callers that treat it as a DTensor: it is replicated now
                self._spec = compat.dtensor_spec(spec.mesh, [Replicate()] * spec.mesh.ndim, data)
                self._local_tensor = data
            with compat.plain_torch_functions():
                source = self if self.requires_grad else part
            with torch.inference_mode(False), torch.set_grad_enabled(part.requires_grad):
                own["value"] = _GatherOutput.apply(source, data, spec, shared.gradient)
            own["node"] = own["value"].grad_fn
        del own["part"]
        return own["value"]

    as_whole = used

    def looked_at(self) -> torch.Tensor:
        """The full tensor without a gradient, for calls that only read it: until another use, this output stays sharded."""
        return vars(self)["shared"].look(self._local_tensor, vars(self)["spec"])

    def __tensor_flatten__(self) -> Any:
        if self.is_whole:
            self.used()
        return super().__tensor_flatten__()

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        return self.used()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.used().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.used(), memo)

    def __copy__(self) -> Any:
        return copy.copy(self.used())

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self.used())

    def __format__(self, spec: str) -> str:
        return format(self.used(), spec)


name_slots(LazyOutput)


def lazy_output(part: torch.Tensor, spec: Any, shared: OutputState) -> LazyOutput:
    """Wrap this rank's part as an output."""
    result: Any = (_KeepSharded.apply(part, spec) if part.requires_grad and torch.is_grad_enabled()
                   else compat.make_dtensor(LazyOutput, part.detach(), spec))
    vars(result).update(part=part, spec=spec, shared=shared)
    return result


def is_detached_of(one: Any, other: Any) -> bool:
    """True if one output was detached from the other, so that they share memory."""
    return isinstance(one, LazyOutput) and isinstance(other, LazyOutput) and one is not other and (
        vars(one).get("shared") is not None and vars(one)["shared"] is vars(other).get("shared"))


class _KeepSharded(torch.autograd.Function):
    """Autograd function from a part to its output; used where the output needs a gradient without having been gathered."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, spec: Any) -> Any:
        ctx.spec = spec
        return compat.make_dtensor(LazyOutput, part.detach(), spec)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return LocalPart.apply(gradient, ctx.spec, PlacedTensor), None


def _on_gradient(func: Callable[..., Any], name: str, output: LazyOutput, *args: Any) -> Any:
    """Register a hook on the wrapper, or read or set its `.grad`: hooks get the gradient as a placed tensor."""
    if name == "register_hook":
        (hook,) = args
        return func(output, lambda gradient: hook(adopt(gradient, PlacedTensor)))
    return adopt(func(output, *args), PlacedTensor)


def _gradients_of(func: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`, or a backward that accumulates into its `inputs`, with outputs of graphs among the tensors."""
    accumulates = func is torch.autograd.backward

    def of_autograd(x: Any) -> Any:
        if not isinstance(x, LazyOutput):
            return x
        with compat.plain_torch_functions():
            if not x.is_of_autograd:
                return x.used()
            if (maker := getattr(vars(x).get("shared"), "maker", None)) is not None:
                maker.note("gradients at its outputs are asked for after its loss")
            if accumulates:
                x.retain_grad()
            return torch.autograd.graph.get_gradient_edge(x)

    edges: Any = of_autograd(inputs) if isinstance(inputs, torch.Tensor) else (
        {name: of_autograd(x) for name, x in inputs.items()} if isinstance(inputs, dict) else [*map(of_autograd, inputs)])
    wholes = map_tensors(lambda x: x.used() if isinstance(x, LazyOutput) else x, outputs)
    return adopt(func(wholes, *args, inputs=edges, **kwargs), PlacedTensor)


class _GatherOutput(torch.autograd.Function):
    """Autograd function from an output, or its part, to the full tensor, which was gathered before."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, data: torch.Tensor, spec: Any, gradient: InputCheck | None) -> torch.Tensor:
        ctx.spec, ctx.gradient, ctx.is_wrapper = spec, gradient, isinstance(output, LazyOutput)
        return data.new_empty(0).set_(data.untyped_storage(), data.storage_offset(), data.shape, data.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.gradient is not None:
            ctx.gradient.before([gradient])
        made = placed_gradient(gradient, ctx.spec, PlacedTensor) if ctx.is_wrapper else LocalPart.apply(
            gradient, ctx.spec, PlacedTensor)
        return made, None, None, None


def _spec_like(spec: Any, part: torch.Tensor) -> Any:
    """The spec with the dtype of this part."""
    return wrap(part.detach(), DTensor, spec)._spec

"""What a compiled graph returns besides the loss: in parts where it was made, and whole at its first use."""
from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from hpml_compiler.runtime.consistency.input_check import InputCheck, gradient_check
from hpml_compiler.runtime.dtensor.dispatch_table import COMPUTED_ATTRIBUTES, KEEPS_ROWS, MEMORY, METADATA
from hpml_compiler.runtime.dtensor.local_dispatch import wrap
from hpml_compiler.runtime.dtensor.op_dispatch import map_tensors, tensors_in
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, name_slots
from hpml_compiler.runtime.placements.gather_parts import gathered_from_parts
from hpml_compiler.runtime.placements.shard_and_gather import local_shard, to_full_tensor
from hpml_compiler.runtime.watchdog.activity_scope import activity
from hpml_compiler.runtime.watchdog.barrier_check import require_all_ranks
from passes import compat
from passes.errors import HpmlError

OF_THE_WRAPPER = METADATA - {
    "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "backward", "detach_",
    "data_ptr"}
READING = ("each rank holds a part of what the model returned besides its loss, and it becomes whole when it is first used, "
           "which all ranks must do: move that out of `if rank == 0:`, and let rank 0 alone print or save the result")


class _OutputState:
    """What an output and those that are detached from it have in common: how to say what it is, and, once somebody has used one
    of them, the whole tensor, without a gradient."""

    __slots__ = ("data", "gradient", "thread", "what")

    def __init__(self, what: str, gradient: InputCheck | None) -> None:
        self.what, self.gradient, self.thread = what, gradient, threading.current_thread()
        self.data: torch.Tensor | None = None

    def whole(self, part: torch.Tensor, spec: Any) -> torch.Tensor:
        if self.data is None:
            self.data = self._gather(part, spec)
        return self.data

    def _gather(self, part: torch.Tensor, spec: Any) -> torch.Tensor:
        what = f"reading {self.what}"
        if self.thread is not threading.current_thread() and self.thread.is_alive() and not compat.inside_backward():
            raise HpmlError(f"{what} for the first time in another thread than the one that made it: it is gathered from all "
                            "ranks, and each could do that at another moment of its step", threading.current_thread().name,
                            "use it first where the model is called (logits = logits.numpy(), say), and give the thread that")
        require_all_ranks(what, READING, every=0)
        with activity(what), torch.inference_mode(False), torch.no_grad():
            return gathered_from_parts(part, spec)


class LazyOutput(PlacedTensor):
    """A result of a compiled graph that each rank has a part of. What nobody uses is never sent.

    Detached or cast, it stays in parts. Any other use makes it whole, on all ranks together, and from then on it is that
    whole tensor in all it does: what is written to it, or to views of it, is there for whoever looks. Gradients flow to the
    part.
    A rank that uses it alone is told so (`require_all_ranks`), whatever it does with it.
    """

    __slots__ = ()

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        with compat.plain_torch_functions():
            operands = tensors_in((args, kwargs))
            if any(isinstance(t, DTensor) and compat.is_fake(t._local_tensor) for t in operands):
                return super().__torch_function__(func, types, args, kwargs)
            output = first if isinstance(first, LazyOutput) else None
            in_parts = output is not None and not output.is_whole
            attribute = name == "__get__" and func.__self__.__name__ not in COMPUTED_ATTRIBUTES
            if in_parts and (attribute or name in OF_THE_WRAPPER):
                return func(*args, **kwargs)
            if output is not None and (attribute or name in METADATA | MEMORY) and compat.is_tracing():
                return func(*args, **kwargs)  # for a fake of the wrapper, whose memory is not that of what it holds
            if output is not None and in_parts and name in KEEPS_ROWS and len(operands) == 1:
                kept = output.kept(func, name, args[1:], kwargs)
                if kept is not None:
                    return kept
            if output is not None and name == "detach" and "shared" in vars(output):
                return output.detached(func)
            used = [(operand, operand.used()) for operand in operands if isinstance(operand, LazyOutput)]
        values = {id(output): value for output, value in used}
        result = func(*map_tensors(lambda t: values.get(id(t), t), args), **map_tensors(lambda t: values.get(id(t), t), kwargs))
        with compat.plain_torch_functions():
            for each, value in used:
                if value.requires_grad and not each.requires_grad:  # changed in place
                    each.requires_grad_()
        return next((output for output, value in used if value is result), result)

    @property
    def is_whole(self) -> bool:
        """Whether somebody has used it, or what it was detached from."""
        shared = vars(self).get("shared")
        return shared is not None and shared.data is not None

    def kept(self, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> LazyOutput | None:
        """The same of a cast, a copy or a detached one, in parts; None where it has to be whole for that."""
        part = vars(self)["part"]
        made = func(part, *args, **kwargs)
        if made is part:
            return self
        if made.device != part.device or made.stride() != part.stride() or made.is_pinned() != part.is_pinned():
            return None
        shared: _OutputState = vars(self)["shared"]
        shared = shared if name == "detach" else _OutputState(shared.what, shared.gradient)
        return lazy_output(made, _spec_like(self._spec, made), shared)

    def detached(self, func: Callable[..., Any]) -> LazyOutput:
        """The same of one that is whole: an output still, as the one that is detached in parts."""
        value = func(self.used())
        result: Any = compat.make_dtensor(LazyOutput, self._local_tensor, self._spec)
        vars(result).update(shared=vars(self)["shared"], spec=vars(self)["spec"], value=value)
        return result

    def used(self) -> torch.Tensor:
        """The whole tensor: always the same one, with a gradient if the part has one, whether or not one is recorded now."""
        own = vars(self)
        if "value" in own:
            return own["value"]
        if "shared" not in own:  # another compiler has made it
            return to_full_tensor(compat.make_dtensor(PlacedTensor, self._local_tensor, self._spec))
        shared, part, spec = own["shared"], own["part"], own["spec"]
        with compat.outside_transforms():
            data = shared.whole(self._local_tensor, spec)
            if self._local_tensor is not data:  # for whoever takes it for a DTensor: it lies whole on each rank now
                self._spec = compat.dtensor_spec(spec.mesh, [Replicate()] * spec.mesh.ndim, data)
                self._local_tensor = data
            with torch.inference_mode(False), torch.set_grad_enabled(part.requires_grad):
                own["value"] = _GatherOutput.apply(part, data, spec, shared.gradient)
        del own["part"]
        return own["value"]

    as_whole = used

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


def lazy_output(part: torch.Tensor, spec: Any, shared: _OutputState) -> LazyOutput:
    """This rank's part as an output."""
    result: Any = (_KeepSharded.apply(part, spec) if part.requires_grad and torch.is_grad_enabled()
                   else compat.make_dtensor(LazyOutput, part.detach(), spec))
    vars(result).update(part=part, spec=spec, shared=shared)
    return result


class _KeepSharded(torch.autograd.Function):
    """From a part to the output; used where something takes the output's gradient without having used it as a tensor."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, spec: Any) -> Any:
        ctx.spec = spec
        return compat.make_dtensor(LazyOutput, part.detach(), spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _part_of(gradient, ctx.spec), None


class _GatherOutput(torch.autograd.Function):
    """From a part to the whole tensor, which was gathered before."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, data: torch.Tensor, spec: Any, gradient: InputCheck | None) -> torch.Tensor:
        ctx.spec, ctx.gradient = spec, gradient
        return data.new_empty(0).set_(data.untyped_storage(), data.storage_offset(), data.shape, data.stride())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.gradient is not None:
            ctx.gradient.before([gradient])
        return _part_of(gradient, ctx.spec), None, None, None


def _part_of(gradient: torch.Tensor, spec: Any) -> torch.Tensor:
    with compat.plain_torch_functions():
        if isinstance(gradient, DTensor):
            return gradient.redistribute(spec.mesh, spec.placements)._local_tensor
        return local_shard(gradient, spec.mesh, spec.placements)


def _spec_like(spec: Any, part: torch.Tensor) -> Any:
    """The spec, for the dtype of this part."""
    return wrap(part.detach(), DTensor, spec)._spec


@dataclass(frozen=True)
class ShardedOutput:
    """An output that a graph leaves in parts. position: among its results. like: the whole tensor, as it was traced. name: what
    the graph calls it."""

    position: int
    placements: tuple[Placement, ...]
    like: torch.Tensor
    name: str


class OutputWrapper:
    """How the results of one compiled graph are given to the script."""

    def __init__(self, graph: str, mesh: DeviceMesh, left: Sequence[ShardedOutput]) -> None:
        self.graph, self.calls = graph, 0
        self._left = [
            (each, compat.interned_spec(compat.dtensor_spec(mesh, each.placements, each.like)),
             gradient_check(graph, each.position, each.like) if each.like.is_floating_point() else None) for each in left]

    def given(self, results: Sequence[Any]) -> list[Any]:
        self.calls += 1
        given = list(results)
        for each, spec, gradient in self._left:
            shared = _OutputState(f"output {each.position} ({each.name}) of {self.graph}, call {self.calls}", gradient)
            given[each.position] = lazy_output(given[each.position], spec, shared)
        return given

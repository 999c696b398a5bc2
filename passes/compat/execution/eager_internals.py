"""Eager-mode internals: function transforms, autograd, optimizers, profiler and log."""
from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim.optimizer import _foreach_supported_types as of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as of_utilities
from torch.utils.checkpoint import _StopRecomputationError

from passes.compat.patching.patches import replace_for_good

inside_transform = torch._C._are_functorch_transforms_active
"""True while a transform of `torch.func` (vmap, grad, jvp, ...) is running."""


def outside_transforms() -> Any:
    """Context outside of all running transforms of `torch.func`."""
    return temporarily_clear_interpreter_stack()


def convert_before_differentiating(convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """From now on, `torch.func`'s grad, vjp and jvp (and their derivatives) convert each tensor that they
    differentiate by. They wrap tensors without calling `__torch_function__`, and DTensor would meet plain ones."""
    def converting(wrap: Any) -> Any:
        if getattr(wrap, "converts", None) is convert:
            return wrap

        def converted(maybe_tensor: Any, level: int) -> Any:
            return wrap(convert(maybe_tensor) if isinstance(maybe_tensor, torch.Tensor) else maybe_tensor, level)

        cast("Any", converted).converts = convert
        return converted

    replace_for_good({"_wrap_tensor_for_grad": converting})


def convert_before_vmap(convert: Callable[[Any], Any]) -> None:
    """From now on, `torch.func.vmap` converts each of its arguments."""
    def converting(add: Any) -> Any:
        if getattr(add, "converts", None) is convert:
            return add

        def converted(argument: Any, dim: int, level: int) -> Any:
            return add(convert(argument), dim, level)

        cast("Any", converted).converts = convert
        return converted

    replace_for_good({"_add_batch_dim": converting})


def convert_before_autograd(untraced: Callable[[Any], Any], kinds: tuple[type, ...], convert: Callable[[Any], Any],
                            convert_argument: Callable[[Any, Any], Any] = lambda x, function: x) -> None:
    """From now on, a backward converts the tensors that it starts from, and an autograd function its arguments, where one of
    them is of these classes. Neither calls `__torch_function__`. convert_argument: converts these once more, for a class of
    autograd functions. untraced: `compat.untraced`, for the functions around torch's."""
    concerns = functools.cache(lambda kind: issubclass(kind, kinds))

    def starting(run: Any) -> Any:
        @untraced
        @functools.wraps(run)
        def converted(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            return run(tuple(map(convert, t_outputs)), *args, **kwargs)

        return converted

    def applying(unwrap: Any) -> Any:
        @untraced
        @functools.wraps(unwrap)
        def converted(args: Any) -> Any:
            if any(map(concerns, map(type, args))):
                function = _applied_function()
                args = tuple([convert_argument(convert(x), function) for x in args])
            return unwrap(args)

        return converted

    replace_for_good({"_engine_run_backward": starting})
    replace_for_good({"unwrap_dead_wrappers": applying})


def _applied_function() -> Any:
    """The class of the autograd function whose `apply` is running; None if it cannot be told."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("cls")


def inside_autograd_function() -> bool:
    """True if the forward of a `torch.autograd.Function` is running: autograd takes what it returns for results of its own."""
    if torch.is_grad_enabled():
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY or _APPLY is None and _is_forward(frame.f_code):
            return True
        frame = frame.f_back
    return False


_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""None since torch 2.15, where it is no Python function any more."""


@functools.lru_cache(1024)
def _is_forward(code: Any) -> bool:
    """True if this is the code of an autograd function's forward."""
    kinds: list[Any] = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if getattr(getattr(vars(kind).get("forward"), "__func__", None), "__code__", None) is code:
            return True
    return False


def inside_backward() -> bool:
    """True if autograd runs a backward in this thread: possibly one of its own, for which the script's thread waits."""
    return torch._C._current_graph_task_id() != -1


def saving_is_hooked() -> bool:
    """True where hooks take what autograd saves, as in `torch.utils.checkpoint`, which counts it."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def saving_without_hooks() -> Iterator[None]:
    """Context in which autograd saves what it needs by itself, inside of `torch.utils.checkpoint`, too."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def early_stop_postponed() -> Iterator[None]:
    """Context to whose end a `torch.utils.checkpoint` that recomputes runs all, though it stops once it has what it saves."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    pack, unpack = autograd._top_saved_tensors_default_hooks(True)
    stops: list[Exception] = []

    def pack_all(tensor: torch.Tensor) -> Any:
        try:
            return tensor if stops else pack(tensor)
        except _StopRecomputationError as stop:
            stops.append(stop)
            return tensor

    autograd._push_saved_tensors_default_hooks(pack_all, unpack)
    try:
        yield
    finally:
        autograd._pop_saved_tensors_default_hooks()
    if stops:
        raise stops.pop()


def after_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward that runs in this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def watch_parameter_data(notice: Callable[[torch.Tensor], None]) -> bool:
    """Call `notice` before each use of a parameter's `.data`, for the rest of the process. Returns False if that is not
    possible with this torch."""
    def noticing(data: Any) -> Any:
        def get(parameter: torch.Tensor) -> torch.Tensor:
            notice(parameter)
            return data.__get__(parameter)

        def assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
            notice(parameter)
            data.__set__(parameter, value)

        return property(get, assign)

    return replace_for_good({"Parameter.data": noticing})


def running_node() -> Any:
    """The autograd node that this thread's backward is executing."""
    return torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]


def autograd_function(node: Any) -> Any:
    """The `torch.autograd.Function` whose backward a node runs."""
    return node._forward_cls


def will_accumulate(nodes: Any) -> bool:
    """True if the running backward will call all these nodes (`AccumulateGrad`s) to add to `.grad`.

    False under `torch.autograd.grad` and `backward(inputs=...)` without them, whose callers want the gradient itself.
    """
    try:
        return all(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:  # raised under torch.autograd.grad
        return False


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """A class's `step` without the wrapper that torch installs with the first instance: hooks, and a profiler range."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


use_count: Callable[[torch.Tensor], int] = cast("Any", torch.Tensor)._use_count
"""Reference count of a tensor: 1 for one that only Python knows, where all of Python's references count as one."""


def register_foreach_type(kind: type) -> None:
    """Let optimizers and `clip_grad_norm_` choose their foreach implementation for a tensor type, as for DTensor."""
    supported: list[Any]
    for supported in (of_optimizers, of_utilities):
        if kind not in supported:
            supported.append(kind)


def profiler_is_on() -> bool:
    """True if this thread is being profiled."""
    return bool(torch.autograd._profiler_enabled())  # pyright: ignore[reportPrivateImportUsage]


def annotated(name: str) -> AbstractContextManager[Any]:
    """A range of this name in torch's profiler (an NVTX range under `torch.autograd.profiler.emit_nvtx`); nothing without one.
    """
    return torch.profiler.record_function(name) if profiler_is_on() else nullcontext()


def set_cpp_log_level(level: int) -> int | None:
    """Let torch's C++ code log from this level on (0 information, 1 warnings, 2 errors), as TORCH_CPP_LOG_LEVEL does
    at the start of a process. Returns the level before; None where it cannot be set, and nothing is done.
    """
    try:
        flag = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")  # already loaded, by this name
    except (OSError, ValueError):  # another system's library, or a build without the flag
        return None
    before, flag.value = flag.value, level
    return before


def keeps_graph() -> bool:
    """True if the running backward was called with retain_graph=True, so that it may run again."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def keeping_no_graph(compute: Callable[[], Any]) -> Any:
    """The result of a function that calls backward of a compiled graph for the only time: that graph may overwrite what it
    saved, even where the running backward keeps its own."""
    if not keeps_graph():
        return compute()
    found: list[Any] = []
    start = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        end = _InBackward.apply(start, lambda: found.append(compute()))
    torch.autograd.grad(end, start)
    return found[0]


class _InBackward(torch.autograd.Function):
    """Calls a function in a backward of its own."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, call: Callable[[], Any]) -> torch.Tensor:
        ctx.call = call
        return start.detach()

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call()
        return gradients[0], None

"""Dynamo: the compiled code, sources of graph inputs, skipped functions, and guards."""
from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._guards import TracingContext
from torch._higher_order_ops import utils as inner_graphs

from passes.compat.execution.dtensor_internals import plain_torch_functions
from passes.compat.patching.patches import replace_for_good

LOG_ONCE = ("warning_once", "info_once")
"""Methods that libraries add to loggers, as transformers does."""


@contextlib.contextmanager
def quiet_dynamo() -> Any:
    """Trace through logging calls of libraries (transformers warns once), which would break the graph; and log nothing
    about an operation that fails on fake tensors: the error itself says it."""

    import torch._dynamo.config as config

    functions = set(config.ignore_logging_functions) | {
        function for name in LOG_ONCE
        if (function := getattr(logging.Logger, name, None)) is not None
    }
    fakes = logging.getLogger("torch._subclasses.fake_tensor")
    level = fakes.level
    fakes.setLevel(logging.CRITICAL)
    try:
        with config.patch(ignore_logging_functions=functions):
            yield
    finally:
        fakes.setLevel(level)


@functools.cache
def log_once_while_tracing() -> None:
    """For the rest of the process, messages that a library logs once are logged when Dynamo traces the call, and do not break
    the graph. Not if they are made of values that are not known then."""
    def instead_of(call_method: Any) -> Any:
        from torch._dynamo.variables import ConstantVariable

        @functools.wraps(call_method)
        def log_now(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name not in LOG_ONCE:
                return call_method(self, tx, name, args, kwargs)
            try:
                constants = [each.as_python_constant() for each in args]
                named = {key: each.as_python_constant() for key, each in kwargs.items()}
            except NotImplementedError:
                return call_method(self, tx, name, args, kwargs)
            getattr(self.value, name)(*constants, **named)
            return ConstantVariable.create(None)

        return log_now

    replace_for_good({"LoggingLoggerVariable.call_method": instead_of})


@functools.cache
def allow_scalar_mutation() -> None:
    """Keep Dynamo from dropping writes to float64 tensors without dims.

    It treats every such input as a Python float. After AOTAutograd has found that it cannot trace that float as a symbol,
    Dynamo traces once more without the float's readers, and drops calls whose results nobody reads: `self.seen.add_(1)` among
    them, whose result is the input itself. Without this patch the buffer keeps its old value, silently, with every backend that
    goes through AOTAutograd (seen with torch 2.13).
    """
    def instead_of(remove: Any) -> Any:
        @functools.wraps(remove)
        def remove_inputs_alone(self: Any) -> None:
            # It compares the value of a call; the input itself and `.item()` of it are still removed.
            hidden = {node: node.meta.pop("example_value") for node in self.graph.nodes
                      if node.op != "placeholder" and "example_value" in node.meta}
            try:
                remove(self)
            finally:
                for node, value in hidden.items():
                    node.meta["example_value"] = value

        return remove_inputs_alone

    replace_for_good({"OutputGraph.remove_tensorify_specialized_graphargs": instead_of})


def sets_data(target: Any) -> bool:
    """True if a call is Dynamo's form of `p.data = value`: a method up to torch 2.14, an operator since."""
    return target is torch.Tensor.set_ or target is getattr(torch.ops.aten, "shallow_copy_data_", torch.Tensor.set_)


def ends_in_a_break(gm: torch.fx.GraphModule) -> bool:
    """True if Dynamo ended this graph at a graph break, so that more graphs follow."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def dynamo_made_no_graph() -> bool:
    """True if Dynamo was given something to compile in this process, and made no graph of it for any backend."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["frames"]["total"] > 0 and not utils.counters["stats"]["unique_graphs"]


def graph_break_reasons() -> Counter[str]:
    """Reasons of graph breaks so far in this process, in Dynamo's words, one line each, and their counts."""
    utils, found = sys.modules.get("torch._dynamo.utils"), Counter[str]()
    if utils is None:
        return found
    for kind in ("graph_break", "unimplemented"):
        for text, times in utils.counters[kind].items():
            found[_in_one_line(text)] += times
    return found


def _in_one_line(text: str) -> str:
    """Remove the developer sections. Before torch 2.7, a reason was one line already."""
    lines = [line.strip() for line in text.partition("Developer debug context")[0].splitlines() if line.strip()]
    return " ".join(line if line.endswith((".", "!", "?")) else f"{line}." for line in lines)


def compiled_module_type() -> Any:
    """The class of `torch.compile(module)`; None before Dynamo is loaded."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)


def backend_of(module: torch.nn.Module) -> Any:
    """The backend of a module compiled by `torch.compile(module)` or `module.compile()`; None if it is not compiled."""
    kind = compiled_module_type()
    if kind is None:
        return None
    callback = None
    if isinstance(module, kind):
        callback = getattr(module.dynamo_ctx, "callback", None)
    elif (compiled := module.__dict__.get("_compiled_call_impl")) is not None:
        freevars = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
        callback = freevars["callback"].cell_contents if "callback" in freevars else None
    from torch._dynamo.eval_frame import innermost_backend

    backend = None if callback is None else innermost_backend(callback)
    return getattr(backend, "compiler_fn", backend)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: Dynamo compiles neither this function nor its callees when they run as frames of their own.

    After a graph break it may compile any function that runs inside the model, the runtime's own included. Unlike
    `torch.compiler.disable` it costs nothing per call, and does not stop Dynamo where it traces through.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def as_one_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: Dynamo writes a call of this function into its graph as one node, without a look at its code."""
    torch._dynamo.allow_in_graph(function)
    return function


def break_graph(reason: str) -> None:
    """Break the graph when traced by Dynamo; with fullgraph=True an error that gives the reason."""
    torch._dynamo.graph_break(msg=reason)


@functools.cache
def trace_as(kind: type) -> None:
    """Let Dynamo trace instances of this DTensor class as that class throughout.

    Dynamo makes a fake of a view by repeating the view, and traces `.data` by a function that asks no class: both give a
    bare DTensor, which does not mix with plain tensors.
    """
    bare = kind.__mro__[1]

    def of_same_class(fake_of: Any) -> Any:
        @functools.wraps(fake_of)
        def fake_of_same_class(value: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(value, kind):
                return fake_of(value, *args, **kwargs)
            with _gradient_set_aside(value):
                fake = fake_of(value, *args, **kwargs)
            if type(fake) is bare:
                fake.__class__ = type(value)
            return fake

        return fake_of_same_class

    def by_detaching(data_of: Any) -> Any:
        @functools.wraps(data_of)
        def detached(self: Any, tx: Any) -> Any:
            example = self.as_proxy().node.meta.get("example_value")
            return self.call_method(tx, "detach", [], {}) if isinstance(example, kind) else data_of(self, tx)

        return detached

    replace_for_good({"wrap_to_fake_tensor_and_record": of_same_class})
    replace_for_good({"TensorVariable.method_attr_data": by_detaching})
    _let_inner_graphs_read(bare)


@contextlib.contextmanager
def _gradient_set_aside(tensor: torch.Tensor) -> Iterator[None]:
    """Dynamo makes a fake of `.grad` with that of a leaf, though it reads gradients by their own source. Of one that is a view,
    as of a bucket, it makes the sizes symbols, which takes 16 ms."""
    with plain_torch_functions():
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None:
            tensor.grad = None
    try:
        yield
    finally:
        if gradient is not None:
            with plain_torch_functions():
                tensor.grad = gradient


@functools.cache
def trace_after(kind: type, prepare: Callable[[Any], None]) -> None:
    """Let Dynamo prepare a tensor of this class before it traces a function that takes it."""
    def preparing(wrap: Any) -> Any:
        @functools.wraps(wrap)
        def wrap_prepared(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, kind):
                prepare(value)
            return wrap(self, value, *args, **kwargs)

        return wrap_prepared

    replace_for_good({"VariableBuilder._wrap": preparing})


def _let_inner_graphs_read(kind: type) -> None:
    """Up to torch 2.12 Dynamo stops where a graph inside an operator, such as a branch of `torch.cond`, reads a DTensor.

    It creates fake tensors there to find shared storages. Later releases use a DTensor's local part for that.
    """
    if hasattr(inner_graphs, "is_traceable_wrapper_subclass"):
        return

    def of_local_parts(collect: Any) -> Any:
        @functools.wraps(collect)
        def collect_local_parts(inputs: Any) -> list[Any]:
            found: list[Any] = []
            for given in inputs:
                example: Any = getattr(getattr(given, "node", given), "meta", {}).get("example_value")
                found += [example._local_tensor] if isinstance(example, kind) else collect([given])
            return found

        return collect_local_parts

    replace_for_good({"_collect_fake_inputs": of_local_parts})


def guard_on_placement(sources: Any) -> None:
    """Guard the placed tensors at these sources by class, `requires_grad` and spec, each by one comparison in C++.

    A spec has the mesh, the placements, the shape, strides and dtype; it must be interned (`interned_spec`), since its
    identity is compared. The guards that Dynamo has collected on these tensors and on their parts are dropped:
    they describe the values from before. To be called inside a backend, after the values have been replaced: guards are
    built when it returns.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    replaced = set(sources)
    guards = TracingContext.get().guards_context.dynamo_guards
    dtensor_parts = {"_spec", "_local_tensor", "device_mesh", "requires_grad"}

    def stale(guard: Any) -> bool:
        source = guard.originating_source
        if source in replaced:  # guards on identity (tied parameters) stay
            return guard.create_fn_name() in ("TENSOR_MATCH", "TYPE_MATCH", "TENSOR_SUBCLASS_METADATA_MATCH")
        while (base := getattr(source, "base", None)) is not None:
            if isinstance(source, AttrSource) and source.member in dtensor_parts and base in replaced:
                return True
            source = base
        return False

    # remove_guards_with_source does this for one source at a time, which takes seconds for hundreds of parameters.
    guards.inner = type(guards.inner)(guard for guard in guards.inner if not stale(guard))
    if hasattr(guards, "source_to_guards"):  # torch 2.13 keeps an index
        guards.source_to_guards.clear()
        for guard in guards.inner:
            guards.track_guard_by_source(guard)
    for source in replaced:
        install_guard(source.make_guard(GuardBuilder.TYPE_MATCH),
                      AttrSource(source, "requires_grad").make_guard(GuardBuilder.EQUALS_MATCH),
                      AttrSource(source, "_spec").make_guard(GuardBuilder.ID_MATCH))

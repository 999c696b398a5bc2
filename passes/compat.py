"""The only place that touches private modules of torch, and where releases 2.11 to 2.15 differ.

What takes long to load, such as `torch._inductor` and `torch._dynamo`, is imported when it is used.
"""
from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree  # arguments and results of ops are nested; torch has no public name for this

__all__ = [
    "OpOverload",
    "adopt_foreach_type",
    "aot_autograd",
    "as_interned",
    "backend_of",
    "collectives_through_host",
    "break_graph",
    "compile_with_inductor",
    "convert_before_differentiating",
    "compiled_module_type",
    "default_partition",
    "eager_decompositions",
    "fake_mode_of",
    "inductor_joint_passes",
    "inductor_whole",
    "inside_transform",
    "is_fused_kernel",
    "min_cut_partition",
    "outside_tracing",
    "outside_transforms",
    "depends_on_data",
    "dtensor_spec",
    "dynamo_tried_in_vain",
    "duplicated_inputs",
    "forget_interned_specs",
    "fake_mode",
    "group_timeout",
    "frame_being_compiled",
    "function_being_compiled",
    "guard_on_placement",
    "inductor_decompositions",
    "interned_spec",
    "input_sources",
    "inputs_written",
    "ints_of_sizes",
    "is_fake",
    "local_shape_and_offset",
    "make_dtensor",
    "norm_partial",
    "on_recompile_limit",
    "plain_torch_functions",
    "profiler_is_on",
    "quiet_dynamo",
    "through_host",
    "trace_as",
    "tracing_fake_mode",
    "untraced",
    "use_count",
    "visible_kernels",
    "warm_cpp_compiler",
    "pytree",
    "set_cpp_log_level",
    "side_store",
    "size_hint",
    "source_name",
    "static_int",
    "will_accumulate",
]

_graph_ids = itertools.count()


def aot_autograd(**kwargs: Any) -> Callable[..., Any]:
    """`torch._dynamo.backends.common.aot_autograd`: a backend that traces forward and backward into one graph."""
    from torch._dynamo.backends.common import aot_autograd as make_backend

    return make_backend(**kwargs)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table that inductor traces with."""
    import torch._inductor.lowering  # noqa: F401  # fills the table; without it some ops stay whole
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def eager_decompositions() -> dict[Any, Callable[..., Any]]:
    """The same table without the operators that draw random numbers themselves: inductor's stand-ins for them, made for
    its own generator, draw others from torch's than the operators do. What consists of other operators is kept."""
    table = inductor_decompositions()
    return {op: decomposed for op, decomposed in table.items()
            if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags or op._can_decompose()}


def inductor_whole(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """What `backend="inductor"` does with a Dynamo graph."""
    from torch._inductor.compile_fx import compile_fx

    return cast("Callable[..., Any]", compile_fx(gm, example_inputs))


@functools.cache
def warm_cpp_compiler() -> None:
    """Begin in the background, once in a process, what inductor does before its first C++ kernel: it tries the vector
    instructions and looks over, or compiles, its header. With cold caches that is several seconds of waiting for a
    compiler in subprocesses, while nothing is there to lower yet."""
    import logging
    import threading

    from torch._inductor.codecache import CppPythonBindingsCodeCache

    def compile_least_kernel() -> None:
        try:  # by the comment torch 2.13 knows what needs vector instructions
            CppPythonBindingsCodeCache.load_pybinding(["float*"], 'extern "C" void kernel(float* x) {}  // at::vec::\n')
        except Exception as error:  # inductor meets the same at its first kernel, and its error is the user's
            logging.getLogger("hpml").debug("The C++ compiler could not be warmed: %s", error)

    threading.Thread(target=compile_least_kernel, name="hpml-warm-cpp", daemon=True).start()


@contextlib.contextmanager
def visible_kernels() -> Any:
    """What inductor compiles inside shows its C++ kernels to `torch.profiler`; see `is_fused_kernel`."""
    from torch._inductor import config

    with config.patch({"cpp.enable_kernel_profile": True, "fx_graph_cache": False}):
        yield


def is_fused_kernel(event: str) -> bool:
    """Whether a profiler's event is a kernel that inductor made: `graph_0_cpp_fused_add_3`, `triton_poi_fused_add_1`."""
    return "cpp_fused_" in event or event.startswith("triton_")


def inductor_joint_passes(joint: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Inductor's passes over a joint graph (pattern matching, constant folding, its own random numbers)."""
    import inspect

    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    passes = compile_fx._recursive_joint_graph_passes
    kwargs: dict[str, Any] = {"skip_invoke_subgraph": True}
    if "input_device" in inspect.signature(passes).parameters:  # not in every patch of 2.11
        devices = [n.meta["val"].device for n in joint.graph.find_nodes(op="placeholder")
                   if isinstance(n.meta.get("val"), torch.Tensor)]
        # What a model computes on, where numbers on the CPU are among its inputs.
        kwargs["input_device"] = next((d for d in devices if d.type != "cpu"), devices[0] if devices else None)
    with V.set_fake_mode(fake_mode_of(joint)):  # what replaces random numbers asks for it
        return passes(joint, **kwargs) or joint


def min_cut_partition(joint: torch.fx.GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any, *,
                      deduplicate: bool = False) -> Any:
    """Inductor's partitioner: forward and backward graph, saving what costs least.

    deduplicate: with its elimination of common subexpressions, which knows nothing of nodes held back for backward: see
    `passes.transform.deduplicate`.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(cse=deduplicate):
        return min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=forward_outputs,
            static_lifetime_input_indices=static_inputs,
        )


def default_partition(joint: torch.fx.GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Any:
    """Forward and backward graph, saving everything that backward reads."""
    from torch._functorch.partitioners import default_partition as partition

    return partition(joint, inputs, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=static_inputs)


def compile_with_inductor(gm: torch.fx.GraphModule, example_inputs: Any, *, static_inputs: Any, is_backward: bool,
                          is_inference: bool) -> Callable[..., Any]:
    """Lower one graph of aten calls and functional collectives; the result takes a list of inputs and clears it.

    Never into CUDA graphs, also where inductor is set up for them: not every collective can be captured.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    with config.patch({"triton.cudagraphs": False}):
        return compile_fx_inner(
            gm, example_inputs, static_input_idxs=tuple(static_inputs), is_backward=is_backward,
            is_inference=is_inference, graph_id=next(_graph_ids),
        )


@contextlib.contextmanager
def outside_tracing() -> Any:
    """A context in which tensors are real again, inside a backend: for communication while a graph is traced.

    The Python dispatcher is off too. With it on, a collective is queued by a thread that holds the GIL and waits for
    gloo's queue, while gloo's thread holds the queue and waits for the GIL to free the tensors of the collective before:
    a deadlock, seen in one of a hundred compilations on 2 ranks.
    """
    from torch._dispatch.python import no_python_dispatcher
    from torch.utils._python_dispatch import _disable_current_modes

    with no_python_dispatcher(), _disable_current_modes():
        yield


@functools.cache
def tracing_fake_mode() -> Any:
    """A fake mode for planning without devices; real constants inside a model are let in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def quiet_dynamo() -> Any:
    """Trace on through logging calls of libraries (transformers warns once), which would break the graph; and log nothing
    of an operation that fails on fake tensors: the error itself says it."""
    import logging

    import torch._dynamo.config as config

    functions = set(config.ignore_logging_functions) | {
        function for name in ("warning_once", "info_once")
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


def is_effect_token(placeholder: torch.fx.Node) -> bool:
    """Whether it is no input of the model, but what AOTAutograd orders side effects by (checks of torch.linalg, prints)."""
    return type(placeholder.meta.get("desc")).__name__ == "ForwardTokenAOTInput"


def frame_being_compiled() -> str:
    """Which piece of Python code Dynamo is compiling, as a number that is the same when it compiles that again; "" if none."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return "" if compile_id is None else str(compile_id.frame_id)


def compiled_module_type() -> Any:
    """The class of what `torch.compile(module)` returns; None before Dynamo is loaded."""
    import sys

    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)


def backend_of(module: torch.nn.Module) -> Any:
    """The backend that a module is compiled for, by `torch.compile(module)` or `module.compile()`; None if it is not."""
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


def fake_mode_of(gm: torch.fx.GraphModule) -> Any:
    """The fake mode that a traced graph's values live in, or None if they are real."""
    for node in gm.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def size_hint(size: int | torch.SymInt, unbacked: int) -> int:
    """The number that stands for a size at trace time, without adding a guard.

    unbacked: what to answer for a size that depends on data, for which there is no number.
    """
    if isinstance(size, int):
        return size
    from torch.fx.experimental import symbolic_shapes

    if hasattr(symbolic_shapes, "optimization_hint"):  # torch 2.13
        return int(symbolic_shapes.optimization_hint(size, fallback=unbacked))
    return int(symbolic_shapes.hint_int(size, fallback=unbacked))  # pyright: ignore[reportAttributeAccessIssue]


def depends_on_data(size: int | torch.SymInt) -> bool:
    """Whether a size is only known when the graph runs, such as the length of `nonzero`."""
    if isinstance(size, int):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def static_int(value: Any) -> int | None:
    """The number that a size or another integer of a traced graph is at every call; None if it may differ."""
    if isinstance(value, torch.SymInt):
        return value.node.maybe_as_int()
    return value if isinstance(value, int) else None


def ints_of_sizes(gm: torch.fx.GraphModule) -> list[torch.SymInt]:
    """The integers among the inputs of a Dynamo graph that sizes of its tensors depend on."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    sizes: set[Any] = set()
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("example_value")):
            if isinstance(value, torch.Tensor):
                sizes |= free_symbols((*value.shape, *value.stride()))
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    return [value for value in values if isinstance(value, torch.SymInt) and free_symbols(value) & sizes]


# DTensor's insides, for parameters that are DTensors (hpml_compiler/runtime).

plain_torch_functions = torch._C.DisableTorchFunctionSubclass
"""Context in which `__torch_function__` of subclasses is not called; only modes have a public one."""


def make_dtensor(kind: type, local: torch.Tensor, spec: Any, requires_grad: bool = False) -> Any:
    """A DTensor, or an instance of a subclass, from its local part and its spec (0.8 us).

    DTensor's public constructors derive and check the spec first, and cost 30 us and more.
    """
    return torch.Tensor._dtensor__new__(kind, local, spec, requires_grad=requires_grad)


def dtensor_spec(mesh: Any, placements: Any, like: torch.Tensor) -> Any:
    """The DTensorSpec of a tensor with the shape, strides and dtype of the whole tensor `like`."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(like.shape, like.stride(), like.dtype))


_interned_specs: dict[Any, Any] = {}


def interned_spec(spec: Any) -> Any:
    """The one spec of all that are equal: parameters have these, so that a guard need only compare identities."""
    return _interned_specs.setdefault((id(spec.mesh), spec), spec)  # equal meshes may be of other process groups


def as_interned(spec: Any) -> Any:
    """The interned spec that equals this one, if there is one, else this one."""
    return _interned_specs.get((id(spec.mesh), spec), spec)


def forget_interned_specs() -> None:
    """For a fresh start: parameters that are placed from now on share nothing with those from before."""
    _interned_specs.clear()


def local_shape_and_offset(shape: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part of a tensor, and where it starts in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)


def group_timeout(group: Any) -> timedelta:
    """After how long a collective of a process group gives up."""
    backend = next(iter({group._get_backend(device) for device in group._device_types}))
    return backend.options._timeout


def side_store(prefix: str, timeout_s: float) -> Any:
    """The store of the group of all ranks, through a connection of its own: whoever waits for a key on the other one blocks
    all that use it. None for a store that cannot be reached twice."""
    from torch.distributed.distributed_c10d import _get_default_store

    dist, store = cast("Any", torch.distributed), cast("Any", _get_default_store())
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    return dist.PrefixStore(prefix, dist.TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=timeout_s),
                                                  wait_for_workers=False))


def norm_partial(order: float) -> Any:
    """The placement of norms of parts: reduced, they give the norm of the whole."""
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    return _NormPartial(order)


@functools.cache
def _fake_tensor_type() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a FakeTensor: shape and dtype without data, as Dynamo traces with."""
    return type(tensor) is _fake_tensor_type()


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: Dynamo compiles neither this function nor what it calls, where it meets them running.

    After a graph break it may go on with any function that runs inside the model, the runtime's own included. Unlike
    `torch.compiler.disable` it costs nothing per call, and does not stop Dynamo where it traces through.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def break_graph(reason: str) -> None:
    """Traced by Dynamo: what follows runs without a compiler; with fullgraph=True an error that gives the reason."""
    torch._dynamo.graph_break(msg=reason)


inside_transform = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` (vmap, grad, jvp, ...) is running."""


def outside_transforms() -> Any:
    """A context outside of all transforms of `torch.func` that are running: for what is the same to all of them."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def convert_before_differentiating(convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """From now on, `torch.func`'s grad, vjp and jvp (and what is made of them) convert each tensor that they
    differentiate by. They wrap tensors in a way that `__torch_function__` does not see, and DTensor meets plain ones."""
    from torch._functorch import eager_transforms

    wrap = eager_transforms._wrap_tensor_for_grad
    if getattr(wrap, "converts", None) is convert:
        return

    def converted(maybe_tensor: Any, level: int) -> Any:
        return wrap(convert(maybe_tensor) if isinstance(maybe_tensor, torch.Tensor) else maybe_tensor, level)

    cast("Any", converted).converts = convert
    eager_transforms._wrap_tensor_for_grad = converted


def will_accumulate(nodes: Any) -> bool:
    """Whether the backward that is running will call all these nodes (`AccumulateGrad`s) to add to `.grad`.

    False under `torch.autograd.grad` and `backward(inputs=...)` without them, whose callers want the gradient itself.
    """
    try:
        return all(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:  # its answer under torch.autograd.grad
        return False


use_count: Callable[[torch.Tensor], int] = cast("Any", torch.Tensor)._use_count
"""How many hold a tensor: 1 for one that only Python knows, where all of Python's references count as one."""


def adopt_foreach_type(kind: type) -> None:
    """Let optimizers and `clip_grad_norm_` choose their foreach implementation for a tensor type, as for DTensor."""
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_utilities

    supported: list[Any]
    for supported in (of_optimizers, of_utilities):
        if kind not in supported:
            supported.append(kind)


# Collectives of CUDA tensors over gloo.

_FUNCTIONAL_COLLECTIVES = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor",
    "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_out",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_",
)
_libraries: list[Any] = []  # what is registered goes with its library


@functools.cache
def collectives_through_host(dispatch_key: str = "CUDA") -> None:
    """From now on, functional collectives of CUDA tensors are those of copies in the host's memory: for process groups in
    which gloo carries them. Its `all_gather_into_tensor` reads device memory as if it were the host's and the process
    dies (https://github.com/pytorch/pytorch/issues/152645); other ops are copied inside gloo anyway.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name in _FUNCTIONAL_COLLECTIVES:
        if hasattr(torch.ops._c10d_functional, name):  # the *_out of reduce_scatter is younger than 2.11
            library.impl(name, through_host(getattr(torch.ops._c10d_functional, name).default), dispatch_key)
    _libraries.append(library)


def through_host(op: Any) -> Callable[..., Any]:
    """A functional collective on copies of its tensors in the host's memory. It waits, so that there is nothing to wait for
    in the result; what the op writes to is written back."""
    written = [each.name for each in op._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    names = [each.name for each in op._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        device = next(x.device for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor))
        host = pytree.tree_map_only(torch.Tensor, lambda x: x.cpu(), given)
        positional = [host.pop(name) for name in names[:len(args)]]
        results = op(*positional, **host)
        results = pytree.tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor.default, results)
        if not written:
            return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), results)
        (target,) = (given[name] for name in written)
        for mine, new in zip(pytree.tree_leaves(target), pytree.tree_leaves(results), strict=True):
            mine.copy_(new)
        return target

    return call


# What Dynamo knows while a backend runs.


def fake_mode() -> Any:
    """The fake mode that Dynamo is tracing under; raises RuntimeError outside a backend."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise RuntimeError("not called by Dynamo: there is no tracing context")
    return context.fake_mode


@functools.cache
def trace_as(kind: type) -> None:
    """Let Dynamo trace instances of this DTensor class as that class throughout.

    Dynamo makes a fake of a view by repeating the view, and traces `.data` by a function that asks no class: both give a
    bare DTensor, which does not mix with plain tensors.
    """
    from torch._dynamo.variables import builder
    from torch._dynamo.variables.tensor import TensorVariable

    fake_of, data_of = builder.wrap_to_fake_tensor_and_record, TensorVariable.method_attr_data
    bare = kind.__mro__[1]

    @functools.wraps(fake_of)
    def fake_of_same_class(value: Any, *args: Any, **kwargs: Any) -> Any:
        fake = fake_of(value, *args, **kwargs)
        if type(fake) is bare and isinstance(value, kind):
            fake.__class__ = type(value)
        return fake

    @functools.wraps(data_of)
    def detached(self: Any, tx: Any) -> Any:
        example = self.as_proxy().node.meta.get("example_value")
        return self.call_method(tx, "detach", [], {}) if isinstance(example, kind) else data_of(self, tx)

    builder.wrap_to_fake_tensor_and_record = fake_of_same_class
    TensorVariable.method_attr_data = detached


def duplicated_inputs(gm: torch.fx.GraphModule) -> dict[Any, list[Any]]:
    """Source of a graph input -> the other sources at which Dynamo found the same tensor."""
    from torch._guards import TracingContext

    found: dict[Any, list[Any]] = {source: [] for source in input_sources(gm) if source is not None}
    for guard in TracingContext.get().guards_context.dynamo_guards:
        other = getattr(guard.create_fn, "keywords", {}).get("source_b")
        if other is not None:
            for one, two in ((guard.originating_source, other), (other, guard.originating_source)):
                if one in found:
                    found[one].append(two)
    return found


def function_being_compiled() -> str:
    """Which function Dynamo is compiling, in the words in which it speaks of it; to be called inside a backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    code = InstructionTranslator.current_tx().output.root_tx.f_code  # pyright: ignore[reportOptionalMemberAccess]
    return f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})"


def on_recompile_limit(callback: Callable[[str, int, str, str], None]) -> None:
    """Call back whenever Dynamo gives up compiling a function anew: with the name of the limit in its config, the limit,
    the function, and what differed the last time. It only logs that, so its log is what is listened to."""
    import logging

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told = record.args
            if str(record.msg).startswith("torch._dynamo hit config.") and isinstance(told, tuple) and len(told) >= 4:
                callback(str(told[0]), cast("int", told[1]), str(told[2]), str(told[3]))

    logging.getLogger("torch._dynamo.convert_frame").addHandler(Listener(logging.WARNING))


def dynamo_tried_in_vain() -> bool:
    """Whether Dynamo was given something to compile in this process, and made no graph of it for any backend."""
    import sys

    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["frames"]["total"] > 0 and not utils.counters["stats"]["unique_graphs"]


def input_sources(gm: torch.fx.GraphModule) -> list[Any]:
    """Where Dynamo found the value of each graph input, in order; None for one that it made itself."""
    arguments = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    return [None if argument is None else argument.source for argument in arguments]


def inputs_written(joint: torch.fx.GraphModule) -> set[int]:
    """Positions of the inputs that the traced program changes in place: AOTAutograd has the graph return their new values,
    and copies these into the inputs after each call."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    (output,) = joint.graph.find_nodes(op="output")
    found = (getattr(described, "mutated_input", None) for described in pytree.tree_leaves(output.meta.get("desc", ()))
             if isinstance(described, InputMutationAOTOutput))
    return {cast("Any", given).idx for given in found if hasattr(given, "idx")}


def source_name(source: Any) -> str:
    """A source as a Python expression, such as L['self']._modules['head']._parameters['weight']."""
    return str(source.name() if callable(source.name) else source.name)


def guard_on_placement(sources: Any) -> None:
    """Guard the placed tensors at these sources by class, `requires_grad` and spec, each by one comparison in C++.

    A spec has the mesh, the placements, the shape, strides and dtype; it must be interned (`interned_spec`), since its
    identity is what is compared. The guards that Dynamo has collected on these tensors and on their parts are dropped:
    they describe the values from before. To be called inside a backend, after the values have been replaced: guards are
    built when it returns.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

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


# Looking at a run (hpml_compiler/monitor).


def profiler_is_on() -> bool:
    """Whether somebody profiles this thread."""
    return bool(torch.autograd._profiler_enabled())  # pyright: ignore[reportPrivateImportUsage]


def set_cpp_log_level(level: int) -> int | None:
    """Let torch's C++ code log from this level on (0 information, 1 warnings, 2 errors), as TORCH_CPP_LOG_LEVEL does
    at the start of a process. Returns the level before; None where it cannot be set, and nothing is done.
    """
    import ctypes

    try:
        flag = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")  # already loaded, by this name
    except (OSError, ValueError):  # another system's library, or a build without the flag
        return None
    before, flag.value = flag.value, level
    return before

"""Tracing by AOTAutograd, and the fake tensors that it traces with."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from passes.compat.aot.decomposition_tables import without_wrong_decompositions
from passes.compat.aot.lazy_graphs import lazy_graph_modules
from passes.compat.aot.phase_tags import mark_phases
from passes.compat.capture.module_paths import straighten


def keeping_saved_values() -> Any:
    """Context in which compiled graphs keep the values saved for backward, so that it may run again (`retain_graph=True`)."""
    from torch._functorch import config

    return config.patch(donated_buffer=False)  # pyright: ignore[reportAttributeAccessIssue]


def forgetting_inputs() -> contextlib.AbstractContextManager[Any]:
    """Context in which Dynamo, with any backend, keeps no weak references to the inputs of what it compiles: with one,
    `model.to(...)` cannot replace a parameter. By default that is so for registered backends."""
    config: Any = torch._dynamo.config
    name = "invalidate_compile_context_weakrefs"
    return config.patch(**{name: True}) if hasattr(config, name) else contextlib.nullcontext()


def is_compile_error(error: BaseException) -> bool:
    """True for an error of Dynamo, or of a backend that it called, while it compiled a function."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def mark_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a callable as boxed (AOTAutograd's calling convention): it takes its arguments as one list and empties it, so that
    they can be freed while it runs."""
    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def aot_autograd(**kwargs: Any) -> Callable[..., Any]:
    """`torch._dynamo.backends.common.aot_autograd`: a backend that traces forward and backward into one graph. `partition_fn`
    receives a graph with a phase tag on every call (`passes.compat.aot.phase_tags`)."""
    from torch._dynamo.backends.common import aot_autograd as make_backend

    partition: Any = kwargs.get("partition_fn")

    def with_phases(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any) -> Any:
        mark_phases(joint, num_fwd_outputs)
        return partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)

    backend = make_backend(**(kwargs if partition is None else {**kwargs, "partition_fn": with_phases}))

    def traced(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        straighten(gm)
        with lazy_graph_modules(), without_wrong_decompositions():
            return backend(gm, inputs)

    return traced


@contextlib.contextmanager
def outside_tracing() -> Any:
    """Context in which tensors are real again, inside a backend: for communication while a graph is traced.

    The Python dispatcher is off too. With it on, a collective is queued by a thread that holds the GIL and waits for
    gloo's queue, while gloo's thread holds the queue and waits for the GIL to free the tensors of the collective before:
    a deadlock, seen in one of a hundred compilations on 2 ranks.
    """
    with no_python_dispatcher(), without_modes():
        yield


@contextlib.contextmanager
def without_modes() -> Any:
    """Context without dispatch modes: for callers that enter the mode that they need."""
    with _disable_current_modes():
        yield


@functools.cache
def tracing_fake_mode() -> Any:
    """A fake mode for planning without devices; accepts real constants inside a model."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode() -> Any:
    """The fake mode that Dynamo is tracing under; raises RuntimeError outside a backend."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise RuntimeError("not called by Dynamo: there is no tracing context")
    return context.fake_mode


def is_tracing() -> bool:
    """True if Dynamo is tracing in this thread."""
    return TracingContext.try_get() is not None


def fake_mode_of(gm: torch.fx.GraphModule) -> Any:
    """The fake mode of a traced graph's values, or None if they are real."""
    for node in gm.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return None


@contextlib.contextmanager
def nested_compilation(fake: Any) -> Any:
    """Context for compiling a traced graph after its trace has ended. fake: one of its values."""
    with tracing(TracingContext(fake.fake_mode)):
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a FakeTensor: shape and dtype without data, as Dynamo traces with."""
    return type(tensor) is FakeTensor


def fake_of(meta: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
    """The fake tensor on `device` for a meta tensor made outside of `mode`, with the same storage identity."""
    return FakeTensor(mode, meta, device)


def is_effect_token(placeholder: torch.fx.Node) -> bool:
    """True for a token that orders side effects (checks of torch.linalg, prints), which is no input of the model."""
    return type(placeholder.meta.get("desc")).__name__ == "ForwardTokenAOTInput"


def results_of_program(gm: torch.fx.GraphModule, forward_outputs: int) -> dict[int, tuple[int, str | None]]:
    """Outputs of the traced program itself, without AOTAutograd's own and gradients: index among the graph's outputs -> (index
    among the program's results, placeholder of its tangent). Empty if tracing did not record it, or the graph's outputs have
    changed."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

    (output,) = gm.graph.find_nodes(op="output")
    tangents = {tangent: node.name for node in gm.graph.find_nodes(op="placeholder")
                if (tangent := getattr(node.meta.get("desc"), "output", None)) is not None}
    described, returned = (pytree.tree_leaves(nest, is_leaf=lambda x: x is None)
                           for nest in (output.meta.get("desc", ()), output.args))
    if len(described) != len(returned):
        return {}
    return {k: (each.idx, tangents.get(each)) for k, each in enumerate(described[:forward_outputs])
            if isinstance(each, PlainAOTOutput)}


def expect_gradients(of: dict[int, torch.Tensor]) -> None:
    """Inside the compiler of a forward graph: declare that tangents have the shape and strides of these
    tensors, by index. By default AOTAutograd coerces them to those of the outputs that it traced."""
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta

    if not of:
        return
    known: Any = TracingContext.get().fw_metadata
    metas = known.subclass_tangent_meta
    for number, like in of.items():
        meta = metas[number]
        assert isinstance(meta, PlainTensorMeta), "outputs of a graph on several ranks are plain tensors"
        meta.memory_format = MemoryFormatMeta(size=like.size(), stride=like.stride())


def mutated_inputs(joint: torch.fx.GraphModule) -> set[int]:
    """Positions of the inputs that the traced program mutates: AOTAutograd makes the graph return their new values,
    and copies these into the inputs after each call."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    (output,) = joint.graph.find_nodes(op="output")
    found = (getattr(described, "mutated_input", None) for described in pytree.tree_leaves(output.meta.get("desc", ()))
             if isinstance(described, InputMutationAOTOutput))
    return {cast("Any", given).idx for given in found if hasattr(given, "idx")}


@contextlib.contextmanager
def restrict_overwriting(places: frozenset[int] | None) -> Any:
    """Context: a backward compiled inside reuses only these inputs for results, by index, of those that
    AOTAutograd reports as dead after it; None leaves these unchanged. In a part of a backward, other tensors have those
    indices: parameters, rows of the batch."""
    metadata: Any = getattr(TracingContext.try_get(), "fw_metadata", None)
    if metadata is None or places is None:
        yield
        return
    donated = metadata.bw_donated_idxs
    metadata.bw_donated_idxs = [k for k in donated or () if k in places]
    try:
        yield
    finally:
        metadata.bw_donated_idxs = donated


@contextlib.contextmanager
def allow_overwriting(places: Sequence[int]) -> Any:
    """Context: a graph compiled as backward inside may reuse exactly these inputs for results. Yields whether that is
    supported: not without such inputs, or without gradients."""
    metadata: Any = getattr(TracingContext.try_get(), "fw_metadata", None)
    if metadata is None or not places:
        yield False
        return
    donated = metadata.bw_donated_idxs
    metadata.bw_donated_idxs = [*places]
    try:
        yield True
    finally:
        metadata.bw_donated_idxs = donated


def overwritable_inputs() -> frozenset[int]:
    """Inside the compiler of a backward graph: indices of the inputs that it may overwrite; none by default."""
    known: Any = getattr(TracingContext.try_get(), "fw_metadata", None)
    return frozenset(getattr(known, "bw_donated_idxs", None) or ())


def settings_of_tracing() -> list[Any] | None:
    """Settings, besides a program and its inputs, that determine the traced and compiled graph; None if unknown: a
    script has saved-tensor hooks."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    autograd: Any = vars(torch._C)["_autograd"]
    if autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    cuda = torch.backends.cuda
    return [
        functorch.get_hash(), inductor.get_hash(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        torch.is_autocast_cache_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_default_dtype(), torch.get_default_device(),
        torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled,
        [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()],
    ]


def data_classes() -> list[type]:
    """torch classes whose objects are data in cached graphs: placements, AOTAutograd's descriptions of inputs and outputs, and
    FX's containers."""
    from torch._functorch._aot_autograd import descriptors
    from torch.distributed.tensor import placement_types

    described = [each for each in vars(descriptors).values()
                 if isinstance(each, type) and each.__module__ == descriptors.__name__ and dataclasses.is_dataclass(each)]
    placements = [getattr(placement_types, name) for name in ("Shard", "Replicate", "Partial", "_StridedShard")
                  if hasattr(placement_types, name)]
    return [immutable_list, immutable_dict, *described, *placements]


class _Effects(TorchDispatchMode):
    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def has_effects(function: Callable[[], Any]) -> tuple[Any, bool]:
    """The result of a function, and whether it calls an operator that writes to a tensor or draws random numbers."""
    with _Effects() as effects:
        return function(), effects.found

"""Inductor: decompositions, joint-graph passes, partitioners, and lowering of one graph."""
from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch.utils import _pytree as pytree

from passes.compat.aot.aot_tracing import fake_mode_of, restrict_overwriting
from passes.compat.aot.decomposition_tables import inductor_decompositions, without_wrong_decompositions
from passes.compat.codegen.batch_cpp_kernels import deferred_cpp_kernels
from passes.compat.codegen.cpp_warmup import wait_for_vector_instructions
from passes.compat.codegen.quick_minimum_cut import from_both_ends
from passes.compat.patching.patches import replaced
from passes.session_state import state_of

LOOP_TURN = "hpml_turn"
"""Key in the meta of a call of an unrolled loop: the number of the turn that it is from."""


@dataclass(frozen=True)
class JointPass:
    """A pass over joint graphs. run: takes the graph and the number of forward's outputs. key: equal for passes that do the
    same, as part of the keys of inductor's caches."""

    run: Callable[[torch.fx.GraphModule, int], Any]
    key: str


def inductor_whole(gm: torch.fx.GraphModule, example_inputs: Any,
                   around: Callable[[], Any] = contextlib.nullcontext, joint_pass: JointPass | None = None,
                   ) -> Callable[..., Any]:
    """Compile a Dynamo graph like `backend="inductor"`. around: makes a context in which each half is compiled, backward in
    its first call. joint_pass: changes the joint graph before it is partitioned."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    on_cpus = all(x.device.type == "cpu" for x in example_inputs if isinstance(x, torch.Tensor))
    later = deferred_cpp_kernels if on_cpus else contextlib.nullcontext

    @functools.wraps(compile_fx_inner)
    def compile_half(*args: Any, **kwargs: Any) -> Any:
        wait_for_vector_instructions()
        with around(), later(), _loops_in_order(args[0]):
            return compile_fx_inner(*args, **kwargs)

    # Part of a cache's key: plain inductor caches graphs of the same inputs, decomposed by its own table.
    key = {**config.unsafe_marked_cacheable_functions, "hpml.decompositions": "1"}
    # Around all, since kernels are loaded from AOTAutograd's cache, too.
    settings: dict[str, Any] = {"unsafe_marked_cacheable_functions": key}
    if joint_pass is not None:
        from passes.compat.codegen.joint_pass import PartitionerBehindPass

        settings["custom_partitioner_fn"] = PartitionerBehindPass(joint_pass.run, joint_pass.key, config.custom_partitioner_fn)
    with later(), without_wrong_decompositions(), config.patch(settings):
        return cast("Callable[..., Any]", compile_fx(gm, example_inputs, inner_compile=compile_half,
                                                     decompositions=inductor_decompositions()))


def _loops_in_order(gm: torch.fx.GraphModule, ordered: bool = False) -> contextlib.AbstractContextManager[None]:
    """Context that keeps the order of an unrolled loop, for graphs with one, and adds to its sums in place. ordered: the order
    of all calls is kept anyway."""
    if not any(LOOP_TURN in node.meta for node in gm.graph.nodes):
        return contextlib.nullcontext()
    from passes.compat.codegen.inductor_chunks import products_added_in_place, turns_in_order

    return products_added_in_place() if ordered else turns_in_order(LOOP_TURN)


@contextlib.contextmanager
def visible_kernels() -> Any:
    """Context in which inductor's C++ kernels are visible to `torch.profiler`; see `is_fused_kernel`."""
    from torch._inductor import config

    with config.patch({"cpp.enable_kernel_profile": True, "fx_graph_cache": False}):
        yield


def is_fused_kernel(event: str) -> bool:
    """True if a profiler's event is a kernel that inductor made: `graph_0_cpp_fused_add_3`, `triton_poi_fused_add_1`."""
    return "cpp_fused_" in event or event.startswith("triton_")


def inductor_joint_passes(joint: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Inductor's passes over a joint graph (pattern matching, constant folding, its own random numbers)."""

    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    passes = compile_fx._recursive_joint_graph_passes
    kwargs: dict[str, Any] = {"skip_invoke_subgraph": True}
    if "input_device" in inspect.signature(passes).parameters:  # not in every patch of 2.11
        devices = [n.meta["val"].device for n in joint.graph.find_nodes(op="placeholder")
                   if isinstance(n.meta.get("val"), torch.Tensor)]
        # The model's device, where numbers on the CPU are among its inputs.
        kwargs["input_device"] = next((d for d in devices if d.type != "cpu"), devices[0] if devices else None)
    with V.set_fake_mode(fake_mode_of(joint)), _patterns_for(joint):  # the replacement of random ops reads the mode
        return passes(joint, **kwargs) or joint


@contextlib.contextmanager
def _patterns_for(joint: torch.fx.GraphModule) -> Any:
    """Context in which inductor prepares its attention patterns only for a graph that they could match. Preparing them takes
    half a second, once in a process; all of them contain batched products, which plain models lack."""
    from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm

    graphs = [module.graph for module in joint.modules() if isinstance(module, torch.fx.GraphModule)]
    once = (joint_graph.lazy_init, fuse_attention._sfdp_init, pad_mm._pad_mm_init, misc_patterns._misc_patterns_init)
    if (any(graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default) for graph in graphs)
            or not all(hasattr(function, "cache_info") for function in once)):  # another release may do it otherwise
        yield
        return
    # Not the function that remembers that all is ready: another graph, or another backend, readies the rest.
    with replaced({"lazy_init": lambda ready: ready.__wrapped__, "_sfdp_init": lambda _: lambda *_: None}):
        yield


def min_cut_partition(joint: torch.fx.GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any, *,
                      deduplicate: bool = False) -> Any:
    """Inductor's min-cut partitioner: forward and backward graph.

    deduplicate: with its elimination of common subexpressions, which ignores nodes held back for backward: see
    `passes.transforms.cleanup.common_subexpressions`.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import has_recomputable_ops, min_cut_rematerialization_partition

    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(cse=deduplicate))
        if has_recomputable_ops(joint) and detect_fake_mode() is None:  # random numbers in a checkpointed region ask for it
            stack.enter_context(fake_mode_of(joint))
        return min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=forward_outputs,
            static_lifetime_input_indices=static_inputs,
        )


class _PartitionChosen(BaseException):
    """Raised where the partitioner knows the saved nodes, to skip the construction of two graphs. saved: these nodes. A
    BaseException, which torch does not catch as an error of its own."""

    def __init__(self, saved: list[torch.fx.Node]) -> None:
        self.saved = saved


def chosen_by_min_cut(joint: torch.fx.GraphModule, forward_outputs: int, *, deduplicate: bool = False) -> list[torch.fx.Node]:
    """Nodes that inductor's partitioner would save, in half the time of partitioning. Changes the graph: calls without readers
    are removed and, with `deduplicate`, equal ones."""
    def stop(_: Any, saved: list[torch.fx.Node], *args: Any, **kwargs: Any) -> Any:
        raise _PartitionChosen(saved)

    try:
        with replaced({"minimum_cut": from_both_ends}), replaced({"_extract_fwd_bwd_modules": lambda _: stop}):
            forward, _ = min_cut_partition(joint, (), forward_outputs, (), deduplicate=deduplicate)
    except _PartitionChosen as chosen:
        return chosen.saved
    # A release of torch that makes its two graphs in another way has made them.
    (output,) = forward.graph.find_nodes(op="output")
    results = pytree.tree_leaves(output.args, is_leaf=lambda x: x is None)
    return [x for x in results[forward_outputs:] if isinstance(x, torch.fx.Node)]


def split_by_tags(joint: torch.fx.GraphModule, forward_outputs: int) -> Any:
    """Forward and backward graph by tags: nodes tagged `is_backward` go to backward. Their other operands are saved, and what
    backward only returns, such as a value of forward that backward of another stage reads."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    backward = {node for node in joint.graph.nodes if node.meta.get("partitioner_tag") == "is_backward" or (
        node.op == "placeholder" and "tangents" in str(node.target))}
    (output,) = joint.graph.find_nodes(op="output")
    passed_on = [x for x in output.args[0][forward_outputs:] if isinstance(x, torch.fx.Node)]
    operands = [x for node in joint.graph.nodes if node in backward for x in node.all_input_nodes]
    read = dict.fromkeys(x for x in (*operands, *passed_on) if x not in backward and x.op != "get_attr")
    tensors, numbers = [], []
    for x in read:
        (tensors if isinstance(x.meta.get("val"), torch.Tensor) else numbers).append(x)
    return _extract_fwd_bwd_modules(joint, tensors, numbers, num_fwd_outputs=forward_outputs)


def default_partition(joint: torch.fx.GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Any:
    """Forward and backward graph, saving everything that backward reads."""
    from torch._functorch.partitioners import default_partition as partition

    return partition(joint, inputs, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=static_inputs)


def computes_channels_last(gm: torch.fx.GraphModule) -> bool:
    """True if inductor will compute the convolutions of a graph in channels last."""
    if not any(node.target is torch.ops.aten.convolution.default for node in gm.graph.nodes):
        return False
    from torch._inductor.graph import GraphLowering

    return GraphLowering.decide_layout_opt(gm, is_inference=False)


@contextlib.contextmanager
def strides_of_results() -> Any:
    """Context that collects the result strides reported by lowering, in order; None where not reported."""
    with TracingContext.report_output_strides() as strides:
        yield strides


def strides_reported() -> Sequence[Any]:
    """Strides reported so far for the results of the graph that AOTAutograd is compiling; see above."""
    return getattr(TracingContext.try_get(), "output_strides", None) or ()


def inductor_cache_folder() -> str | None:
    """Inductor's cache folder, shared by all processes of this user; None if the cache is disabled."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir() if config.fx_graph_cache and not config.force_disable_caches else None


def inductor_folder() -> str:
    """Folder in which inductor writes compiled code, whether it is writable or not."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def is_inductor_cacheable(gm: torch.fx.GraphModule) -> bool:
    """True if inductor can cache the compiled graph, and its cache is enabled."""
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache

    try:
        FxGraphCache._check_can_cache(gm)
    except BypassFxGraphCache:
        return False
    return True


class _GraphIds:
    """Numbers of the graphs given to inductor, for its logs."""

    def __init__(self) -> None:
        self.numbers = itertools.count()


def compile_with_inductor(gm: torch.fx.GraphModule, example_inputs: Any, *, static_inputs: Any, is_backward: bool,
                          is_inference: bool, reuse: bool = True, keep_order: bool = False,
                          writes_over: frozenset[int] | None = None) -> Callable[..., Any]:
    """Lower one graph of aten calls and functional collectives; the result takes a list of inputs and clears it.

    reuse: a dead buffer may stay for a later one of its size, instead of being freed at once, and kernels may be reordered.
    keep_order: keep the graph's order except for fusion, even with `reuse`. Otherwise a collective would start at its wait, if
    that lowers peak memory. writes_over: indices of the inputs that may be overwritten, of those that AOTAutograd reports as
    dead: of a saved value and a view of it, it reports both, although one may be read after the other is overwritten.

    Never into CUDA graphs, even if inductor is configured for them: not every collective can be captured.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    import passes.compat.codegen.inductor_random  # noqa: F401  registers how inductor lowers one of our operators
    from passes.compat.codegen.inductor_order import scheduled_in_graph_order

    wait_for_vector_instructions()
    if is_backward and writes_over is not None:
        kept = [node for k, node in enumerate(gm.graph.find_nodes(op="placeholder")) if k not in writes_over]
        for node in kept:
            node.target = f"kept_{node.target}"  # caches of compiled code hash the text of a graph, not what it may overwrite
        if kept:
            gm.recompile()
    settings = {"triton.cudagraphs": False, **({"reorder_for_peak_memory": False} if keep_order else {})}
    in_order = contextlib.nullcontext if reuse else scheduled_in_graph_order
    with in_order(), _loops_in_order(gm, not reuse), config.patch(settings), restrict_overwriting(writes_over):
        return compile_fx_inner(
            gm, example_inputs, static_input_idxs=tuple(static_inputs), is_backward=is_backward,
            is_inference=is_inference, graph_id=next(state_of(_GraphIds).numbers),
        )

"""Patches: the functions of torch and other libraries, and tables of functions, that hpml replaces, in one table.

Each entry states its purpose, the expected parameters, and the consequence without it. Before a function is replaced, its
parameters are compared with these (the probe). Where they differ, or the function is gone, it is left as it is, with one
log line: a new release of torch disables a feature, and breaks nothing.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("hpml")
_lock = threading.RLock()
"""Held while functions are replaced, so that each thread restores the function that it found."""


@dataclass(frozen=True)
class Patch:
    """target: module, and the name in it, of a function, of a class, or of a dict of functions. parameters: the leading
    parameters of the function, the class or a function of the dict, by name. seen: the first and the last release of torch
    in which the probe succeeds. cache: name beside it of a cache that depends on it. A replacement must accept further
    parameters."""

    target: str
    parameters: tuple[str, ...]
    why: str
    without: str
    seen: tuple[str, str] = ("2.11", "2.15")
    cache: str = ""
    called: str = ""

    @property
    def name(self) -> str:
        return self.called or self.target.rpartition(":")[2]

    def place(self) -> tuple[Any, str]:
        """The object with the function, and its name there. Raises ImportError or AttributeError."""
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        return owner, name

    def probe(self) -> str | None:
        """Reason why the function cannot be replaced; None if it can."""
        try:
            owner, name = self.place()
            target = getattr(owner, name)
            if self.cache:
                getattr(owner, self.cache).clear  # noqa: B018  # a cache can be emptied
        except (ImportError, AttributeError) as error:
            return str(error)
        if self.cache and not isinstance(target, dict):
            return f"{self.name} is no table"
        functions = () if not self.parameters else target.values() if isinstance(target, dict) else (target,)
        try:
            all_found = {tuple(_parameters(function))[:len(self.parameters)] for function in functions}
        except (TypeError, ValueError):
            return f"{self.name} is no function that can be looked into"
        if not all_found or self.parameters in all_found:
            return None
        return f"its parameters are {', '.join(next(iter(all_found))) or 'none'}"


def _parameters(function: Any) -> Iterable[str]:
    """Names of a function's parameters; of a class of torch's C++ code, those of its docstring, without `self`."""
    if not isinstance(function, type):
        return inspect.signature(function).parameters
    signature = (function.__init__.__doc__ or "").partition("\n")[0].partition("->")[0]
    return re.findall(r"(\w+): ", signature)[1:]


STORES = ("rendezvous", "elastic.rendezvous.c10d_rendezvous_backend", "elastic.rendezvous.static_tcp_rendezvous")
"""Modules of torch.distributed that open stores."""

PROCESS_GROUP_METHODS = frozenset((
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "send", "recv", "recv_anysource"))
"""Methods of a process group that take tensors."""
NEW_PROCESS_GROUP_METHODS = frozenset((
    "all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "all_to_all_single"))
"""Those that torch 2.11 does not have."""

DECOMPOSED_WRONGLY = ("multilabel_margin_loss_forward.default",)
"""Never decomposed: a target of -1, which ends a row's targets, adds to the loss."""
BYTES_DECOMPOSED_WRONGLY = tuple(f"{name}.{overload}" for overload in ("default", "vec") for name in (
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa"))
"""Not decomposed for images of uint8, which the operators round otherwise."""

PATCHES = {patch.name: patch for patch in (
    Patch("torch._dynamo.output_graph:OutputGraph.call_user_compiler", ("self", "gm", "example_inputs"),
          "backends of others get plain tensors where the script has placed ones",
          "functions that other backends compile cannot take placed tensors"),
    Patch("torch._dynamo.output_graph:OutputGraph.remove_tensorify_specialized_graphargs", ("self",),
          "writes to float64 tensors of no dims stay in the graph",
          "a graph may lose writes to a float64 tensor of no dims"),
    Patch("torch._dynamo.variables.builder:wrap_to_fake_tensor_and_record", ("e", "tx"),
          "fakes of placed tensors are of their class", "views of placed tensors break the graph"),
    Patch("torch._dynamo.variables.builder:VariableBuilder._wrap", ("self", "value"),
          "compiled functions take outputs that are not computed yet", "such an output in a compiled function raises an error"),
    Patch("torch._dynamo.variables.misc:LoggingLoggerVariable.call_method", ("self", "tx", "name", "args", "kwargs"),
          "messages that a library logs once do not break the graph", "such a message breaks the graph"),
    Patch("torch.nn:Parameter.data", (), "writes through `.data` to a parameter that a deferred output needs are noticed",
          "outputs of a model are computed in forward, also where nobody reads them"),
    Patch("torch._dynamo.variables.tensor:TensorVariable.method_attr_data", ("self", "tx"),
          "`.data` of a placed tensor is of its class", "`.data` of placed tensors breaks the graph"),
    Patch("torch._higher_order_ops.utils:_collect_fake_inputs", ("inputs",),
          "branches of torch.cond may read placed tensors", "such a branch breaks the graph", ("2.11", "2.12")),
    Patch("torch._functorch.eager_transforms:_wrap_tensor_for_grad", ("maybe_tensor", "level"),
          "torch.func differentiates by placed parameters", "torch.func cannot take placed parameters"),
    Patch("torch._functorch.vmap:_add_batch_dim", ("self", "batch_dim", "level"),
          "torch.func.vmap takes placed parameters", "torch.func.vmap cannot take placed parameters"),
    Patch("torch.autograd:_engine_run_backward", ("t_outputs",),
          "torch.autograd.backward takes results of sharded outputs that are not computed yet",
          "torch.autograd.backward of such a result raises an error"),
    Patch("torch._functorch.utils:unwrap_dead_wrappers", ("args",),
          "autograd functions take results of sharded outputs that are not computed yet",
          "a gradient through such a function raises an error"),
    Patch("torch._functorch.partitioners:_extract_fwd_bwd_modules", ("joint_module", "saved_values"),
          "the partitioner ends once it knows the saved values", "planning under a budget takes longer"),
    Patch("networkx:minimum_cut", ("flowG", "_s", "_t"),
          "the partitioner's cut is found by searching from both ends, in a third of the time (torch 2.15 has its own)",
          "planning takes up to a tenth longer"),
    Patch("torch._inductor.fx_passes.joint_graph:lazy_init", ("input_device",),
          "patterns of attention are not prepared for graphs without batched products",
          "the first graph takes half a second more"),
    Patch("torch._inductor.fx_passes.fuse_attention:_sfdp_init", ("input_device",),
          "the same", "the first graph takes half a second more"),
    Patch("torch._inductor.async_compile:AsyncCompile.wait", ("self", "scope"),
          "graphs are lowered while kernels of others are compiled", "each graph waits for its kernels"),
    Patch("torch._inductor.async_compile:AsyncCompile.cpp_pybinding", ("self", "argtypes", "source_code"),
          "kernels of a graph share runs of the C++ compiler", "each kernel is compiled by itself"),
    Patch("torch._inductor.codegen.cpp:CppScheduling.ready_to_flush", ("self",),
          "a group of kernels ends where it frees memory", "a step may hold up to 14 % more than its budget"),
    Patch("torch._inductor.scheduler:Scheduler.can_fuse", ("self", "node1", "node2"),
          "kernels are not fused across calls of a library", "a step may hold up to 14 % more than its budget"),
    Patch("torch._inductor.memory:reorder_for_peak_memory", ("nodes",), "chunks of a loss run one after another",
          "a loss in chunks may hold the logits of all of them"),
    Patch("torch._inductor.fx_passes.reinplace:inplaceable_ops", (), "chunks of a loss add to the head's gradient in place",
          "each chunk of a loss copies the head's gradient"),
    Patch("torch._inductor.ir:StorageBox.should_realize_on_reuse", ("self", "users"),
          "costly results of several readers are computed once (torch 2.13 has the same operators by itself)",
          "a step may hold more than its budget"),
    Patch("torch._inductor.cpu_vec_isa:valid_vec_isa_list", (),
          "vector instructions are tried only as far as one is asked for", "the first kernel takes some seconds more"),
    *(Patch(f"torch.distributed:ProcessGroup.{method}", (), "a script's collectives on placed tensors act on the full tensors",
            f"{method} of a process group on a placed tensor sees this rank's part", seen)
      for methods, seen in ((PROCESS_GROUP_METHODS, ("2.11", "2.15")), (NEW_PROCESS_GROUP_METHODS, ("2.13", "2.15")))
      for method in sorted(methods)),
    *(Patch(f"torch.jit:{function}", ("obj",) if function == "script" else ("func",),
            "TorchScript refuses modules with placed parameters", "TorchScript saves the part of one rank, or crashes",
            called=f"jit.{function}") for function in ("script", "trace")),
    Patch("torch.nn:SyncBatchNorm.forward", ("self", "input"), "SyncBatchNorm of a split model runs as BatchNorm",
          "SyncBatchNorm counts each row once per rank"),
    Patch("torch.nn.parallel:DistributedDataParallel.__new__", (), "DDP around a split model does nothing",
          "DDP around a split model reduces gradients again"),
    Patch("torch._dynamo.eval_frame:OptimizedModule.__init__", ("self", "mod", "dynamo_ctx"),
          "`torch.compile(module)` checks the module for wrappers", "wrappers are found at the first graph"),
    Patch("torch.distributed.fsdp:FullyShardedDataParallel.__init__", ("self", "module"),
          "FSDP around a split model is refused", "FSDP around a split model fails later"),
    Patch("torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__init__", ("self", "param"),
          "fully_shard of a placed parameter is refused", "fully_shard of a placed parameter fails later"),
    Patch("torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler._create_tcp_store_server",
          ("self", "master_addr", "master_port"),
          "stores of one node listen on loopback alone", "torchrun's store of a run on one node listens on all interfaces"),
    *(Patch(f"torch.distributed.{module}:TCPStore", ("host_name", "port", "world_size", "is_master"),
            "the same", "a store of a run on one node listens on all interfaces", called=f"{module}.TCPStore")
      for module in STORES),
    Patch("torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers", ("op_call", "args", "kwargs"),
          "placed tensors that torch reads as numbers are gathered; before torch 2.13, gradients keep their class",
          "a placed tensor that torch reads as a number gives this rank's part"),
    *(Patch(f"torch:ops.aten.{operator}.py_kernels", (), "operators are not traced through decompositions that differ",
            f"results of {operator} may differ from eager's", cache="_dispatch_cache")
      for operator in (*DECOMPOSED_WRONGLY, *BYTES_DECOMPOSED_WRONGLY)),
    Patch("accelerate.state:PartialState.__init__", ("self", "cpu"), "accelerate sees one process and one device",
          "one_device() has no effect on accelerate, which wraps models in DDP"),
    *(Patch(f"accelerate:{function}", parameters, "checkpoints hold full tensors", "checkpoints hold the part of one rank")
      for function, parameters in (("Accelerator.get_state_dict", ("self", "model")), ("Accelerator.save_state", ("self",)),
                                   ("checkpointing.load_model", ("model", "filename")))),
    *(Patch(f"transformers:Trainer.{function}", ("self", *parameters), "rank 0 writes checkpoints with full tensors",
            "all ranks write checkpoints, with their parts")
      for function, parameters in (("_save", ("output_dir", "state_dict")), ("_save_optimizer_and_scheduler", ()),
                                   ("_save_rng_state", ()), ("_save_checkpoint", ()))),
    *(Patch(f"transformers:TrainingArguments.{name}", (), "each rank trains on its own GPU",
            "the Trainer of each rank uses all GPUs by DataParallel") for name in ("device", "n_gpu")),
)}
"""By the name in its module, or the one that they are called by."""

Replacing = Mapping[str, Callable[[Any], Any]]
"""Names in PATCHES, with a factory of the replacement from the original function."""


def wrapping(make: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    """Factory of a replacement with the name, the docstring and the signature of the original function."""
    return lambda original: functools.wraps(original)(make(original))


def replace_for_good(replacements: Replacing) -> bool:
    """Replace functions for the rest of the process: all of them, or none where a probe fails. Returns True if replaced."""
    with _lock:
        return _replace(replacements) is not None


@contextlib.contextmanager
def replaced(replacements: Replacing) -> Iterator[bool]:
    """Context in which functions are replaced: all of them, or none where a probe fails. Yields True if replaced. Other threads
    that replace functions wait."""
    with _lock:
        before = _replace(replacements)
        try:
            yield before is not None
        finally:
            for patch, owner, name, function in before or ():
                _put(patch, owner, name, function)


def _replace(replacements: Replacing) -> list[tuple[Patch, Any, str, Any]] | None:
    """Replace, and return the originals."""
    if not all([_can_be_replaced(name) for name in replacements]):
        return None
    before = []
    for name, make in replacements.items():
        patch = PATCHES[name]
        owner, attribute = patch.place()
        before.append((patch, owner, attribute, inspect.getattr_static(owner, attribute)))
        _put(patch, owner, attribute, make(getattr(owner, attribute)))
    return before


def _put(patch: Patch, owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)
    if patch.cache:
        getattr(owner, patch.cache).clear()


@functools.cache
def _can_be_replaced(name: str) -> bool:
    """Run the probe, once in a process: a replaced function has the parameters of its replacement."""
    patch = PATCHES[name]
    why = patch.probe()
    if why is not None:
        log.warning("%s of this torch is not as hpml knows it (%s): %s", patch.target.replace(":", "."), why, patch.without)
    return why is None

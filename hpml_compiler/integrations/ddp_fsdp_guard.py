"""Guard against DDP and FSDP around models compiled with hpml: DDP is replaced by a shim, FSDP raises an error.

DDP and FSDP keep references to the original parameters. The backend replaces these by placed ones, so their reductions
would silently not reach the gradients. Importing this is cheap: it is loaded with the backend's entry point.
"""
from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Set
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpml_compiler.integrations.sync_batch_norm import use_global_batch
from hpml_compiler.runtime.install import uncompiled_models
from hpml_compiler.runtime.process.live_objects import live_objects
from passes import compat
from passes.errors import BadInput

BACKEND = "hpml_compiler.backend"
"""Module of the function that `torch.compile` calls."""

REMEDY = "leave the wrapper out: torch.compile(model, backend='hpml') shards and reduces by itself"


def watch() -> None:
    """Detect wrappers around models compiled with this backend. Called once, when its module is imported."""
    watch_ddp()
    watch_compiled_modules()
    uncompiled_models.report_at_first_step()


@functools.cache
def watch_ddp() -> None:
    """Patch DDP so that it makes a `SplitDDP` around a model compiled with this backend."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        module = kwargs.get("module", args[0] if args else None)
        if isinstance(module, nn.Module) and several_ranks():
            cls = _class_for(cls, module)
        return object.__new__(cls)

    compat.replace_for_good({"DistributedDataParallel.__new__": lambda _: new})


def _class_for(cls: type, module: nn.Module) -> type:
    if is_split(module):
        from hpml_compiler.integrations.ddp_shim import SplitDDP

        if cls is not DistributedDataParallel and not issubclass(cls, SplitDDP):
            raise BadInput(f"{cls.__name__} is a DDP of its own around a model compiled with backend='hpml', and would reduce "
                           "nothing", "torch.compile(..., backend='hpml')", "leave it out")
        return SplitDDP if cls is DistributedDataParallel else cls
    inside = [name for name, inner in module.named_modules() if is_split(inner)]
    if inside:
        raise BadInput("DDP is put around a module of which only a part is compiled with backend='hpml', "
                       f"{', '.join(inside[:3])}: gradients would be reduced in two ways", "DistributedDataParallel",
                       "compile the whole module, or leave DDP out (Lightning: strategy=HpmlStrategy(), see "
                       "docs/integrations.md)")
    return cls


def watch_compiled_modules() -> None:
    """Patch compiled modules so that `torch.compile(module, backend="hpml")` checks the module for wrappers."""
    compat.on_fully_shard(_before_sharding)
    if getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None) is not None:
        _watch_fsdp()
    if compat.compiled_module_type() is not None:  # Dynamo is loaded
        _watch_compiled_modules()


@functools.cache
def _watch_compiled_modules() -> None:
    def checking(original: Any) -> Any:
        @functools.wraps(original)
        def init(self: Any, mod: nn.Module, dynamo_ctx: Any, *args: Any, **kwargs: Any) -> None:
            original(self, mod, dynamo_ctx, *args, **kwargs)
            if several_ranks() and is_split(self):
                _before_compiling(mod)
                uncompiled_models.report_after_first_call(self)
            if is_split(self):
                uncompiled_models.refuse_without_values(self)

        return init

    compat.replace_for_good({"OptimizedModule.__init__": checking})


@functools.cache
def _watch_fsdp() -> None:
    """Patch FullyShardedDataParallel to reject models compiled with this backend, as `fully_shard` rejects placed parameters.
    (Scripts import `fully_shard` by name: before parameters are placed, it is detected at the next compilation.)"""

    def checking(original: Any) -> Any:
        @functools.wraps(original)
        def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if several_ranks() and any(is_split(inner) for inner in module.modules()):
                raise BadInput("FullyShardedDataParallel is put around a model compiled with backend='hpml'",
                               "FullyShardedDataParallel", REMEDY)
            original(self, module, *args, **kwargs)

        return init

    compat.replace_for_good({"FullyShardedDataParallel.__init__": checking})


def _before_sharding(parameter: Any) -> None:
    """Raise BadInput for a placed parameter. (torch would take it for tensor parallelism and raise an unclear error.)"""
    module = sys.modules.get("hpml_compiler.runtime.dtensor.placed_tensor")
    if module is not None and isinstance(parameter, module.PlacedTensor):
        raise BadInput("fully_shard is put around a model that was compiled with backend='hpml' and split already",
                       "fully_shard", REMEDY)


def _before_compiling(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        what = _shards_by_itself(inner)
        if what:
            raise BadInput(f"{what} shards the parameters of this model already", f"torch.compile of {_named(name)}", REMEDY)
        if isinstance(inner, DistributedDataParallel):
            from hpml_compiler.integrations.ddp_shim import SplitDDP

            if not isinstance(inner, SplitDDP):
                SplitDDP.adopt(inner)
        if isinstance(inner, nn.SyncBatchNorm):
            use_global_batch(name, inner)


def is_split(module: nn.Module) -> bool:
    """True if the module is compiled by `torch.compile(module, backend="hpml")` or `module.compile(backend="hpml")`."""
    return getattr(compat.backend_of(module), "__module__", "") == BACKEND


def several_ranks() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def refuse_other_wrappers(inputs: Any) -> None:
    """Raise BadInput if a parameter among a graph's inputs belongs to a wrapper that the patches missed: one that was made
    before this module was loaded, or whose forward is part of the compiled function."""
    wanted = {id(value) for value in inputs if isinstance(value, nn.Parameter)}
    if _wrapper_of(wanted) is not None:
        gc.collect()  # unreachable wrappers do not count, and ranks collect garbage at different times
    if (wrapper := _wrapper_of(wanted)) is not None:
        what = _shards_by_itself(wrapper)
        raise BadInput(f"{what} shards the parameters of this model already" if what else
                       "DDP is around this model, and its reductions would not see the gradients",
                       type(wrapper).__name__, REMEDY)


def _wrapper_of(wanted: Set[int]) -> Any:
    """A wrapper of any of these parameters (by id), or of a model compiled with this backend."""
    return next((wrapper for wrapper in _wrappers() if any(map(is_split, wrapper.modules()))
                 or any(id(parameter) in wanted for parameter in wrapper.parameters())), None)


def _wrappers() -> list[Any]:
    """All DDP and FSDP modules of this process."""
    return [wrapper for wrapper in live_objects(*_sharding_types(), DistributedDataParallel) if not _is_ours(type(wrapper))]


def _is_ours(kind: type) -> bool:
    module = sys.modules.get("hpml_compiler.integrations.ddp_shim")
    return module is not None and issubclass(kind, module.SplitDDP)


def _sharding_types() -> tuple[type, ...]:
    module = sys.modules.get("torch.distributed.fsdp")
    return tuple(kind for name in ("FSDPModule", "FullyShardedDataParallel")
                 if (kind := getattr(module, name, None)) is not None)


def _shards_by_itself(module: nn.Module) -> str:
    if not isinstance(module, _sharding_types()):
        return ""
    return "FullyShardedDataParallel" if type(module).__name__ == "FullyShardedDataParallel" else "fully_shard"


def _named(name: str) -> str:
    return f"`{name}`" if name else "the model"

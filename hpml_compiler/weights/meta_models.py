"""Give memory to a model of the meta device: each rank holds its shards, and one module, or one tensor, at a time.

Parameters are stored as ZeRO-3 does: dim 0 over all ranks, where they divide it, else whole. Compiled graphs are planned
with parameters that are stored so.
"""
from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from hpml_compiler.runtime.consistency.initial_sync import sync_rng
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.install.parameter_sharding import place_parameter
from hpml_compiler.runtime.install.swap_parameters import rebind
from hpml_compiler.runtime.optimizer.optimizer_step import watch_optimizers
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.world_group import ensure_process_group
from hpml_compiler.runtime.weights.loaded_parameters import note_loaded
from hpml_compiler.session.session import current
from hpml_compiler.weights.module_initialization import ModuleRule, is_written, rules_of, unwritten_like
from passes import compat
from passes.errors import BadInput


class MetaParameters:
    """The parameters of a model that have no memory yet, each with its modules and names. mesh: that of the compiled model."""

    def __init__(self, model: nn.Module, mesh: Mapping[str, int] | None) -> None:
        self.sites: dict[int, list[tuple[nn.Module, str, str]]] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    self.parameters[id(parameter)] = parameter
                    self.sites.setdefault(id(parameter), []).append((module, name, f"{prefix}.{name}".lstrip(".")))
        ranks = ensure_process_group()
        _check_mesh(mesh, ranks)
        self._mesh = current().device_mesh(mesh or {"dp": ranks}) if self.parameters and ranks > 1 else None
        self._names: list[str] = []
        self._olds: list[nn.Parameter] = []
        self._news: list[nn.Parameter] = []

    def empty(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter without values yet: this rank's shard, on the device that computes."""
        if self._mesh is None:
            return nn.Parameter(torch.empty_like(parameter, device=device_type()), parameter.requires_grad)
        placements = stored(parameter, self._mesh)
        local = list(parameter.shape)
        if isinstance(placements[0], Shard):
            local[0] //= self._mesh.size()
        with compat.plain_torch_functions():
            order = sorted(range(parameter.dim()), key=lambda dim: -parameter.stride(dim))
            part = torch.empty_permuted(local, order, dtype=parameter.dtype, device=device_type())  # no view, so it may move
            new = compat.make_dtensor(PlacedTensor, part, compat.dtensor_spec(self._mesh, placements, parameter),
                                      parameter.requires_grad)
            new._is_param = True  # isinstance(new, nn.Parameter) checks this
        return new

    def shard(self, whole: nn.Parameter) -> nn.Parameter:
        """This rank's shard of a parameter with values that are equal on all ranks."""
        whole = nn.Parameter(whole.detach().to(device_type()), whole.requires_grad)
        return whole if self._mesh is None else place_parameter(whole, self._mesh, stored(whole, self._mesh))

    def put(self, parameter: nn.Parameter, new: Any) -> None:
        """Replace a parameter in the model; `finish` does so in the rest of the script."""
        new.__dict__.update({**parameter.__dict__, **new.__dict__})
        if (spec := getattr(new, "_spec", None)) is not None:  # equal blocks that are compiled one by one then have one graph
            new._spec = compat.interned_spec(spec)
        for module, name, _ in self.sites[id(parameter)]:
            module._parameters[name] = new
        self._names.append(self.sites[id(parameter)][0][2])
        self._olds.append(parameter)
        self._news.append(new)

    def finish(self) -> None:
        """Replace the parameters in optimizers and other objects that were made before."""
        self.parameters.clear()
        if self._mesh is not None:
            watch_optimizers()
            compat.trace_as(PlacedTensor)
            note_loaded(dict(zip(self._names, self._news, strict=True)))
        rebind(self._names, self._olds, self._news)


def stored(parameter: torch.Tensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Dim 0 over all ranks where they divide it, else whole."""
    divides = parameter.dim() > 0 and parameter.shape[0] >= mesh.size() and parameter.shape[0] % mesh.size() == 0
    return (Shard(0) if divides else Replicate(),) * mesh.ndim


def _check_mesh(mesh: Mapping[str, int] | None, ranks: int) -> None:
    if mesh is None:
        return
    where = "mesh of a model on the meta device"
    if "pp" in mesh:
        raise BadInput("a model on the meta device cannot be cut into pipeline stages yet", where,
                       "use other axes, or make the model on the CPU")
    if math.prod(mesh.values()) != ranks:
        raise BadInput(f"the mesh {dict(mesh)} multiplies to {math.prod(mesh.values())}, but there are {ranks} ranks", where,
                       "give the mesh that the model is compiled with")


def _give_back_memory() -> None:
    """Give freed memory back to the system: shards that are allocated between whole tensors leave holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None  # glibc's
    if trim is not None:
        trim(0)


def initialize(model: nn.Module, *, mesh: Mapping[str, int] | None = None) -> nn.Module:
    """Initialize a model that was made on the meta device by its modules' own rules, one module at a time::

        with torch.device("meta"):
            model = Model()
        hpml_compiler.initialize(model)

    The rules are `reset_parameters` and, in a model of transformers, its `_init_weights`. Each rank keeps its shards; a rank
    holds no more than these and one whole module. Random numbers are those of one device that calls the rules in the same
    order, that of the modules in the model; transformers begins with inner modules, as `initialize_weights` does. mesh: that of
    the compiled model, by default {"dp": ranks}. Returns the model. All ranks call this, with the same seed. Raises BadInput
    for a module with parameters or buffers of its own but no rule, and for tensors that no rule has written.
    """
    model = getattr(model, "_orig_mod", model)
    meta = MetaParameters(model, mesh)
    rules = rules_of(model)
    for each in rules:
        if each.rule is None:
            raise BadInput(f"{type(each.module).__name__} has parameters or buffers on the meta device, and no "
                           "reset_parameters()", each.name or "the model",
                           "give the class that method, or use hpml_compiler.load")
    if dist.is_initialized() and dist.get_world_size() > 1:
        sync_rng()  # otherwise a parameter would be made of shards of different tensors
    open_ends: list[tuple[str, nn.Module, str]] = []
    for each in rules:
        unwritten = _initialize_module(each, meta)
        open_ends += [(f"{each.name}.{name}".lstrip("."), each.module, name) for name in unwritten]
        _give_back_memory()
    for path, module, name in open_ends:  # the rule of an outer module may have written it
        tensor = module._parameters.get(name, module._buffers.get(name))
        if tensor is not None and not is_written(tensor, _version(tensor)):
            raise BadInput(f"{type(module).__name__}'s initialization leaves {name} without values", path,
                           "write it in reset_parameters (_init_weights in a model of transformers), or use hpml_compiler.load")
    meta.finish()
    return model


def _initialize_module(each: ModuleRule, meta: MetaParameters) -> list[str]:
    """Make one module's tensors whole, call its rule, and keep the shards. Returns names of tensors that it has not written."""
    module, made = each.module, dict[str, Any]()
    olds = {name: parameter for name, parameter in module._parameters.items() if parameter is not None and parameter.is_meta}
    for name, parameter in olds.items():
        made[name] = module._parameters[name] = nn.Parameter(unwritten_like(parameter), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            made[name] = module._buffers[name] = unwritten_like(buffer)
    versions = {name: tensor._version for name, tensor in made.items()}
    with torch.no_grad():
        assert each.rule is not None, "checked before"
        each.rule()
    made.update((name, tensor) for name, tensor in [*module._parameters.items(), *module._buffers.items()] if name in made)
    unwritten = [name for name, tensor in made.items() if not is_written(tensor, versions[name])]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device_type())
    made.clear()
    for name, parameter in olds.items():
        whole = module._parameters[name]
        assert whole is not None, "it was made above"
        meta.put(parameter, meta.shard(whole))
    return unwritten


def _version(tensor: torch.Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor)._version


def meta_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, name in it, name in the model) of the buffers without memory."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield module, name, f"{prefix}.{name}".lstrip(".")

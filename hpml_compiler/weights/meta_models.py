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
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from hpml_compiler.runtime.consistency.initial_sync import sync_rng
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.install.parameter_sharding import place_parameter
from hpml_compiler.runtime.install.swap_parameters import rebind
from hpml_compiler.runtime.optimizer.optimizer_step import watch_optimizers
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.world_group import ensure_process_group
from hpml_compiler.session.session import current
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
            part = torch.empty([local[dim] for dim in order], dtype=parameter.dtype, device=device_type())
            part = part.permute(sorted(range(parameter.dim()), key=order.__getitem__))
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
    """Initialize a model that was made on the meta device, by its modules' own `reset_parameters`, one module at a time::

        with torch.device("meta"):
            model = Model()
        hpml_compiler.initialize(model)

    Each rank keeps its shards; a rank holds no more than these and one whole module. Modules are initialized in their order in
    the model, so that random numbers are those of one device that makes the modules in this order. mesh: that of the compiled
    model, by default {"dp": ranks}. Returns the model. All ranks call this, with the same seed. Raises BadInput for a module
    with parameters or buffers of its own but no `reset_parameters`.
    """
    model = getattr(model, "_orig_mod", model)
    meta = MetaParameters(model, mesh)
    modules = [(name, module) for name, module in model.named_modules() if any(
        tensor is not None and tensor.is_meta for tensor in [*module._parameters.values(), *module._buffers.values()])]
    for name, module in modules:
        if not callable(_reset_of(module)):
            raise BadInput(f"{type(module).__name__} has parameters or buffers on the meta device, and no reset_parameters()",
                           name or "the model", "give the class that method, or use hpml_compiler.load")
    if dist.is_initialized() and dist.get_world_size() > 1:
        sync_rng()  # otherwise a parameter would be made of shards of different tensors
    for _, module in modules:
        olds = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        for name, parameter in olds.items():
            module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad
                                                    ) if parameter.is_meta else parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        with torch.no_grad():
            _reset_of(module)()
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device_type())
        for name, parameter in olds.items():
            if parameter.is_meta:
                whole = module._parameters[name]
                assert whole is not None, "it was made above"
                meta.put(parameter, meta.shard(whole))
        whole = None
        _give_back_memory()
    meta.finish()
    return model


def _reset_of(module: nn.Module) -> Any:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def meta_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, name in it, name in the model) of the buffers without memory."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield module, name, f"{prefix}.{name}".lstrip(".")

"""A backend for tests: shards every parameter it can on dim 0, gathers them again at each call, runs Dynamo's graph."""
from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from hpml_compiler.runtime.install.parameter_sharding import placeable, shard_module
from hpml_compiler.runtime.install.unwrap_inputs import InputPlacement, take_out_markers
from passes import compat


class Gather(torch.autograd.Function):
    """Local part -> whole; the whole gradient, equal on all ranks, -> local part."""

    @staticmethod
    def forward(ctx, local, placement: InputPlacement):
        ctx.placement = placement
        for axis, p in reversed(list(enumerate(placement.placements))):
            if isinstance(p, Shard):
                parts = [torch.empty_like(local) for _ in range(placement.mesh.size(axis))]
                dist.all_gather(parts, local.contiguous(), group=placement.mesh.get_group(axis))
                local = torch.cat(parts, p.dim)
        return local.clone()

    @staticmethod
    def backward(ctx, gradient):
        for axis, p in enumerate(ctx.placement.placements):
            if isinstance(p, Shard):
                mesh = ctx.placement.mesh
                gradient = gradient.chunk(mesh.size(axis), p.dim)[mesh.get_local_rank(axis)]
        return gradient.clone(), None


class Toy:
    """`torch.compile(model, backend=Toy(...))`; `compiles` counts graphs, `graphs` keeps them."""

    def __init__(self, aot: bool = False, mesh: DeviceMesh | None = None, choose=None) -> None:
        self.aot, self.compiles, self.graphs, self.placed = aot, 0, [], []
        self.mesh = mesh
        self.choose = choose or self.dim_0

    def dim_0(self, parameter):
        """The default placement: dim 0 over the first axis that divides it."""
        divides = parameter.dim() and parameter.shape[0] % self.mesh.size(0) == 0
        return (Shard(0) if divides else Replicate(), *[Replicate()] * (self.mesh.ndim - 1))

    def __call__(self, gm, example_inputs):
        self.mesh = self.mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        self.compiles += 1
        self.graphs.append(gm)
        example_inputs = compat.original_inputs(example_inputs)
        gm, examples, placed = take_out_markers(gm, example_inputs, compat.fake_mode())
        self.placed.append(placed)
        placements = {i: self.choose(example_inputs[i]) for i in placeable(gm, example_inputs)}
        installed = shard_module(placements, gm, example_inputs, self.mesh)
        placed = placed | {i: InputPlacement(self.mesh, p) for i, p in placements.items()}
        fn = gm.forward
        if self.aot:
            fn = compat.aot_autograd(fw_compiler=_eager, bw_compiler=_eager)(gm, examples)
        return functools.partial(_run, fn, installed, placed)


def _run(fn, installed, placed, *args):
    args = installed.locals(args)
    for i, placement in placed.items():
        args[i] = Gather.apply(args[i], placement)
    return fn(*args)


def _eager(graph, examples):
    def call(args):
        result = graph(*args)
        args.clear()
        return result

    call._boxed_call = True
    return call

"""Functions compiled by another backend, given sharded tensors -> their results with plain ones."""
from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from hpml_compiler.runtime.batch.batch_shard import shard_batch
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.install.other_backends import watch_backends
from hpml_compiler.runtime.placements.inner_shard import InnerShard
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank
from passes import compat
from passes.errors import BadInput
from tests.hpml_compiler.runtime.test_same_as_plain import placed

PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial(), SingleRank(1), InnerShard(0, 2))


def newton_schulz(g, other):
    x = g / g.norm()
    for _ in range(3):
        a = x @ x.T
        x = 1.5 * x - 0.5 * a @ x
    return x


def mix(g, other):
    return torch.einsum("ij,kj->ik", g, other)


def in_place(g, other):
    g.mul_(0.5).add_(other)
    return g.sum()


def foreach(g, other):
    torch._foreach_lerp_([g], [other], 0.1)
    return g.norm(), other + g


def several(g, other):
    return g[1:3], [g.t(), g * 2], {"same": g}


def broken(g, other):
    x = (g * 2).sum()
    torch._dynamo.graph_break()
    return g + x, other * x


FUNCTIONS = (newton_schulz, mix, in_place, foreach, several, broken)


def arguments(mesh=None, placement=None):
    torch.manual_seed(0)
    g, other, rows = (torch.randn(8, 6, dtype=torch.float64) for _ in range(3))
    if mesh is None:
        return g, other, rows
    return placed(g, mesh, placement), placed(other, mesh, placement), shard_batch(rows, mesh)


def plainly(value):
    return pytree.tree_map_only(torch.Tensor, lambda tensor: to_full_tensor(tensor).detach().clone(), value)


def check(function, backend, mesh, placement):
    theirs, ours = arguments(), arguments(mesh, placement)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    pairs = [(ours[0], ours[1]), (ours[0], torch.full_like(theirs[1], 0.5)), (ours[0], ours[2])]
    expected = [(theirs[0], theirs[1]), (theirs[0], torch.full_like(theirs[1], 0.5)), (theirs[0], theirs[2])]
    for mine, plain in zip(pairs, expected, strict=True):
        torch.testing.assert_close(plainly(compiled(*mine)), plainly(function(*plain)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(plainly(ours), plainly(theirs), rtol=1e-10, atol=1e-10)


def check_gradients(backend, mesh, placement):
    values, gradients = arguments(), []
    for g in (values[0].clone(), placed(values[0], mesh, placement)):
        torch._dynamo.reset()
        g.requires_grad_()
        torch.compile(mix, backend=backend)(g, values[1]).pow(2).sum().backward()
        gradients.append(plainly(g.grad))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-10)


def check_optimizer(backend, mesh, placement):
    """torch.compile of an optimizer's step. (It computes its corrections in float32, where it is one graph.)"""
    found = []
    for parameter, gradient, _ in (arguments(), arguments(mesh, placement)):
        torch._dynamo.reset()
        parameter.requires_grad_()
        parameter.grad = gradient
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(2):
            step()
        found.append(plainly(parameter))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)


def run_all(rank):
    mesh = init_device_mesh("cpu", (2,))
    compat.trace_as(PlacedTensor)
    watch_backends()
    for index, placement in enumerate(PLACEMENTS):
        check(FUNCTIONS[index], "aot_eager", mesh, placement)
        check(FUNCTIONS[index], "eager", mesh, PLACEMENTS[index - 1])
        check(FUNCTIONS[index], "aot_eager", mesh, PLACEMENTS[index - 2])
    for placement in (Shard(0), SingleRank(1), Replicate()):
        check_gradients("aot_eager", mesh, placement)
    check_optimizer("aot_eager", mesh, Shard(0))
    g = arguments(mesh, Shard(0))[0]
    with pytest.raises(BadInput, match="shares memory"):
        torch.compile(in_place, backend="aot_eager")(g, g.detach())


def test_functions_of_other_backends_take_placed_tensors_as_whole(launch):
    launch(run_all, world_size=2)

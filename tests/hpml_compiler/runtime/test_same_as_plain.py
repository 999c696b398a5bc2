"""Lines of eager code on placed tensors of every placement -> the same values in all tensors as on one device.

Each line runs once on placed tensors and once on plain ones, in float64. Then all tensors are compared, also those that
the line should have left alone; and what the line gives, and the gradients that flow back.
"""
from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hpml_compiler.runtime.dtensor.placed_tensor import GatheredView, PlacedTensor, place
from hpml_compiler.runtime.placements.inner_shard import InnerShard
from hpml_compiler.runtime.placements.shard_and_gather import local_shard
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank
from passes import compat
from tests.hpml_compiler.runtime.common import full
from tests.hpml_compiler.runtime.lines import CHANGES, GRADIENTS, VALUES

PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial(), SingleRank(1), InnerShard(0, 2))

def environment(mesh=None, placement=None):
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(shape, dtype=torch.float64)  # noqa: E731
    values = {"w": make(8, 6), "u": make(8, 6), "b": make(6), "s": make(), "r": make(8, 6), "c": make(6), "n": make()}
    if mesh is not None:
        for name in "wu":
            values[name] = placed(values[name], mesh, placement)
        values["b"] = place(values["b"], mesh, [Shard(0)])
        values["s"] = placed(values["s"], mesh, Partial())
    return values


def placed(value, mesh, placement):
    if not placement.is_partial():
        return place(value, mesh, [placement])
    rank = mesh.get_local_rank()
    return compat.make_dtensor(PlacedTensor, value * (3 if rank == 0 else -2), compat.dtensor_spec(mesh, [placement], value))


def run_line(line, values):
    """What the last expression of the line gives, or the exception that it raised."""
    space = {"torch": torch, "F": F, "nn": nn, "copy": copy, "pickle": pickle, **values}
    torch.manual_seed(1)
    *statements, last = line.split("; ")
    try:
        for statement in statements:
            exec(statement, space)
        try:
            code = compile(last, "line", "eval")
        except SyntaxError:
            exec(last, space)
            result = None
        else:
            result = eval(code, space)
    except Exception as error:
        result = error
    values.update({name: space[name] for name in values})
    return result


def same(ours, theirs):
    """Each rank compares its part, without gathering, except of what is to be reduced still."""
    if isinstance(ours, (list, tuple)) and not isinstance(ours, torch.Size):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same(a, b)
        return
    if isinstance(ours, torch.Tensor):
        ours, theirs = ours.detach() * 1 if type(ours) is GatheredView else ours.detach(), theirs.detach()
    if isinstance(ours, DTensor):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if any(placement.is_partial() for placement in ours.placements):
            ours = full(ours)
        else:
            theirs = local_shard(theirs, ours.device_mesh, ours.placements)
            ours = ours.to_local()
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-9)
    elif hasattr(theirs, "dtype"):  # of numpy
        assert abs(ours - theirs).max() < 1e-9
    else:
        assert ours == theirs


def differences(lines, mesh, gradients, placements_of):
    found = []
    for index, line in enumerate(lines):
        for placement in placements_of(index):
            ours, theirs = environment(mesh, placement), environment()
            if gradients:
                for values in (ours, theirs):
                    for name in "wub":
                        values[name].requires_grad_()
            result, expected = run_line(line, ours), run_line(line, theirs)
            if isinstance(expected, Exception):
                if not isinstance(result, Exception):
                    found.append(f"{placement} {line}: gives {type(result)}, one device raises {expected}")
                continue
            if isinstance(result, Exception):
                found.append(f"{placement} {line}: raises {type(result).__name__} {str(result)[:200]}")
                continue
            try:
                check(line, result, expected, ours, theirs, gradients)
            except Exception as error:
                found.append(f"{placement} {line}: {type(error).__name__} {str(error)[:300]}")
    return found


def check(line, result, expected, ours, theirs, gradients):
    placements = {name: ours[name].placements for name in "wub" if isinstance(theirs[name], torch.Tensor)}
    same(result, expected)
    for name in theirs:
        same(ours[name], theirs[name])
    if gradients and isinstance(expected, torch.Tensor) and expected.requires_grad:
        try:
            expected.pow(2).sum().backward()
        except (RuntimeError, NotImplementedError):  # an op without a derivative
            return
        result.pow(2).sum().backward()
        for name in "wub":
            assert (ours[name].grad is None) == (theirs[name].grad is None), name
            same(ours[name].grad, theirs[name].grad)
    for name, placement in placements.items():
        assert ours[name].placements == placement


def run_all(rank, everything):
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for lines, gradients in ((CHANGES, False), (VALUES, False), (VALUES + GRADIENTS, True)):
        placements = PLACEMENTS[:3] if gradients else PLACEMENTS
        placements_of = (lambda _, p=placements: p) if everything else (lambda index, p=placements: [p[index % len(p)]])
        found += differences(lines, mesh, gradients, placements_of)
    assert not found, "\n".join(found)


def test_each_line_gives_what_it_gives_on_one_device(launch):
    """Each under one placement; HPML_TEST_EVERYTHING=1 tries each under all."""
    everything = os.environ.get("HPML_TEST_EVERYTHING") == "1"
    launch(run_all, world_size=2, args=(everything,), timeout_s=600 if everything else 150)

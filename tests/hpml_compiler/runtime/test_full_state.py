"""Placed models of every kind -> the state that one device has, and every rank gathers equally often."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from hpml_compiler import full_state_dict
from hpml_compiler.runtime.consistency.input_check import RanksDiffer
from hpml_compiler.runtime.dtensor.placed_tensor import place
from hpml_compiler.runtime.install.parameter_sharding import place_parameter
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank
from hpml_compiler.runtime.process.world_group import control_group, from_all_ranks


def tied(to):
    """Two names for one parameter, and others of its shape behind it."""
    model = nn.ModuleDict({"in": nn.Embedding(8, 8), "a": nn.Linear(8, 8), "out": nn.Linear(8, 8, bias=False),
                           "b": nn.Linear(8, 4)})
    model["in"].weight = model["out"].weight = to(model["in"].weight)
    for name in ("a", "b"):
        model[name].weight = to(model[name].weight)
    return model


def several_owners(to):
    """As of a pipeline: parameters of one shape, of other ranks, tied ones among them."""
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    for number, layer in enumerate(model):
        layer.weight, layer.bias = to(layer.weight, SingleRank(number % 2)), to(layer.bias, SingleRank(number // 2))
    model[3].weight, model[2].bias = model[1].weight, model[0].bias
    return model


def aliased(to):
    """Buffers that lie in a parameter's memory: all of it, and a part."""
    model = nn.Linear(8, 8)
    model.weight = to(model.weight)
    model.register_buffer("same", model.weight.detach())
    model.register_buffer("other_view", model.weight.detach().t())
    model.register_buffer("kept", model.bias.detach())
    return model


def empty(to):
    model = nn.Module()
    for name, shape in {"none": (0, 4), "no_columns": (4, 0), "one": (1, 4), "three": (3, 4), "none_too": (0, 4)}.items():
        model.register_parameter(name, to(nn.Parameter(torch.randn(shape)), Shard(0)))
    model.register_buffer("plain", torch.empty(0))
    model.register_buffer("plain_too", torch.empty(0))
    return model


def scalars(to):
    model = nn.Module()
    model.scale, model.gain = nn.Parameter(torch.tensor(2.0)), to(nn.Parameter(torch.tensor(3.0)), Replicate())
    model.far = to(nn.Parameter(torch.tensor(4.0)), Replicate())
    model.register_buffer("count", torch.tensor(7))
    return model


def frozen_and_sparse(to):
    model = nn.Linear(8, 4)
    model.weight = to(model.weight.requires_grad_(False))
    model.register_buffer("graph", torch.eye(8).to_sparse())
    model.register_buffer("rows", torch.eye(8).to_sparse_csr())
    model.register_buffer("not_saved", torch.ones(3), persistent=False)
    return model


MODELS = (tied, several_owners, aliased, empty, scalars, frozen_and_sparse)
PLACEMENTS = (Shard(0), Shard(1), Replicate(), SingleRank(0), SingleRank(1))


def plain(parameter, placement=None):
    return parameter


def counted(of):
    """What it returns, and how many collectives each rank began for it."""
    groups = [torch.distributed.group.WORLD, control_group()]
    before = [group._get_sequence_number_for_group() for group in groups]
    result = of()
    return result, [group._get_sequence_number_for_group() - b for group, b in zip(groups, before, strict=True)]


def build(make, to):
    torch.manual_seed(0)
    model = make(to)
    parameters = [p for p in dict.fromkeys(model.parameters()) if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.1) if parameters else None
    for number, p in enumerate(parameters):
        torch.manual_seed(number)
        average = torch.randn(p.shape)
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": average.clone(), "factors": [torch.ones(2), None],
                              "same": average}
    return model, optimizer


def place_state(optimizer, mesh):
    for p, state in optimizer.state.items():
        if hasattr(p, "placements"):
            for name in ("exp_avg", "same"):
                state[name] = place(state[name], mesh, p.placements)
        state["factors"][1] = state["same"]


def check(mesh, make, placement):
    def to(parameter, own=None):
        each = own or placement
        return place_parameter(parameter, mesh, [each if parameter.dim() > getattr(each, "dim", 0) else Replicate()])

    (model, optimizer), (reference, its) = build(make, to), build(make, plain)
    if optimizer is not None:
        place_state(optimizer, mesh)
        for state in its.state.values():
            state["factors"][1] = state["same"]
    state, count = counted(lambda: full_state_dict(model, optimizer))
    alone, its_count = counted(lambda: full_state_dict(model))
    assert all(other == (count, its_count) for other in from_all_ranks((count, its_count))), (make, placement)
    if mesh.get_local_rank():
        assert state == alone == {}
        return
    expected = {"model": reference.state_dict(), "optimizer": its.state_dict() if its else None}
    compare(state if optimizer else {"model": state.get("model", state), "optimizer": None}, expected)
    compare(alone, expected["model"])
    shared = {name: value.data_ptr() for name, value in alone.items() if value.layout is torch.strided and value.numel()}
    theirs = {name: value.data_ptr() for name, value in expected["model"].items() if name in shared}
    for a in shared:
        for b in shared:
            same = expected["model"][a].stride() == expected["model"][b].stride() and theirs[a] == theirs[b]
            assert (shared[a] == shared[b]) == same or placement == Replicate(), (make, placement, a, b)


def compare(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        assert type(ours) is torch.Tensor and ours.layout is theirs.layout
        torch.testing.assert_close(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            compare(ours[key], theirs[key])
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            compare(a, b)
    else:
        assert ours == theirs


def other_names(mesh):
    """One rank has another tensor, or fewer, and both hear of it."""
    for extra in ("b", None):
        model = nn.Module()
        name = "a" if mesh.get_local_rank() == 0 else extra
        if name is not None:
            model.register_buffer(name, place(torch.ones(4), mesh, [Shard(0)]))
        with pytest.raises(RanksDiffer, match=r"rank 0 has \.model\.a .* where rank 1 has"):
            full_state_dict(model)


def run_all(rank):
    mesh = init_device_mesh("cpu", (2,))
    for make in MODELS:
        for placement in PLACEMENTS:
            check(mesh, make, placement)
    other_names(mesh)


def test_every_rank_gathers_what_all_do(launch):
    launch(run_all)

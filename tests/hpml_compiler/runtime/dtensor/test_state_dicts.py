"""Saved on two ranks -> loaded on one, two and four, in new processes: training goes on as on one device."""
from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from hpml_compiler import full_state_dict
from hpml_compiler.runtime.placements.inner_shard import InnerShard
from tests.hpml_compiler.test_scripts import X, Y, adamw, compiled, step


class Fused(nn.Module):
    """Query, key and value weights in one, which are split by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 3, 4, 4).unbind(1)
        return self.out(((q * k).softmax(-1) * v).flatten(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), Fused(), nn.Tanh(), nn.Linear(16, 4)).double()


def run_save(rank, folder):
    for mesh in ({"dp": 2}, {"tp": 2}):
        model = net()
        call = compiled(model, mesh)
        optimizer = adamw(model)
        for _ in range(2):
            step(call, optimizer)
        assert any(p.placements[0].is_shard() for p in model.parameters()) or "dp" in mesh
        assert isinstance(model[3].qkv.weight.placements[0], InnerShard) or "dp" in mesh
        path = f"{folder}/{next(iter(mesh))}"
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=f"{path}-sync")
        future = dcp.async_save(state, checkpoint_id=f"{path}-async")
        before = [p.to_local().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():  # staged before this call returned
                p.mul_(7)
        future.result()
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.to_local().copy_(value)
        whole_state = full_state_dict(call, optimizer)
        if rank == 0:
            assert list(whole_state["model"]) == list(net().state_dict())
            assert all(type(value) is torch.Tensor for value in whole_state["model"].values())
            torch.save(whole_state, f"{path}-full.pt")
        else:
            assert whole_state == {}
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}-pickled{rank}.pt")


def run_load(rank, folder):
    world = dist.get_world_size()
    seen = {}
    model = net()
    call = compiled(model, {"tp": world}) if world > 1 else model
    optimizer = adamw(model)
    for saved in ("dp", "tp"):
        for kind in ("sync", "async", "full", "pickled"):
            step(call, optimizer)  # other values than the saved ones, placed where there are several ranks
            load(model, optimizer, f"{folder}/{saved}-{kind}")
            seen[f"{saved} {kind}"] = [step(call, optimizer) for _ in range(2)]
    return seen


def load(model, optimizer, path):
    if path.endswith(("full", "pickled")):
        path = f"{path}.pt" if path.endswith("full") else f"{path}0.pt"
        state = torch.load(path, weights_only=True, mmap=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
                   options=StateDictOptions(strict=True))


def test_saved_on_two_ranks_loaded_on_any(launch, tmp_path):
    model = net()
    optimizer = adamw(model)
    expected = [step(model, optimizer, X, Y) for _ in range(4)][2:]
    launch(run_save, args=(str(tmp_path),), timeout_s=110)
    for world in (1, 2, 4):
        for seen in launch(run_load, world_size=world, args=(str(tmp_path),), timeout_s=110):
            for kind, losses in seen.items():
                torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=1e-9,
                                           msg=lambda text, kind=kind, world=world: f"{kind} on {world}: {text}")

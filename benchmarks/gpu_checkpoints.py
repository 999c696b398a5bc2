"""Checks of `gpu_pass.py`: a run that is interrupted and resumed, and a model from the meta device."""
from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks import HERE, WEIGHT_TOLERANCE, farthest, models_of
from torch import nn
from torch.nn import functional as F

STEPS, SAVED = 8, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.last(x), x[:, :64].sin())


def trained(folder: str, device: str, options: dict[str, Any], until: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps up to `until`, from the newest checkpoint of the folder on, and the parameters after them."""
    import hpml_compiler
    from hpml_compiler.session import session

    torch.compiler.reset()
    session.reset()
    torch.manual_seed(0)
    model = Net().to(device)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "costs": "roofline", "monitor": False, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(device)
    kept = hpml_compiler.Checkpointer(folder, model, optimizer, extra={"scaler": scaler}, every=SAVED, keep=None)
    losses = []
    for k in range(kept.resume(), until):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = call(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
        kept.step(k)
    kept.close()
    return losses, {key: _whole(value) for key, value in model.state_dict().items()}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu()  # pyright: ignore[reportAttributeAccessIssue]


def checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """An uninterrupted run, and one that is resumed in its middle, with dropout, autocast and a GradScaler: bit for bit. A
    model from the meta device, initialized in shards, against the whole one."""
    from hpml_compiler.runtime.process.world_group import ensure_process_group

    ensure_process_group()
    shared = [tempfile.mkdtemp(prefix="hpml-gpu-checkpoint-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    found: dict[str, Any] = {}
    try:
        splits = {"dp": {"mesh": {"dp": 2}}, "tp": {"mesh": {"tp": 2}}, "zero 3": {"mesh": {"dp": 2}, "zero": 3}}
        for name, options in splits.items():
            folder = os.path.join(shared[0], name)
            whole, state = trained(folder, args.device, options, STEPS)
            again, restored = trained(folder, args.device, options, STEPS)
            found[name] = {"equal": again == whole[SAVED:] and all(torch.equal(restored[key], state[key]) for key in state),
                           "losses": whole, "resumed": again}
        found["meta"] = {"equal": from_meta(args.device) < WEIGHT_TOLERANCE}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(shared[0])
    bad = [name for name, each in found.items() if not each["equal"]]
    return {"ok": not bad, "says": f"differ: {', '.join(bad)}" if bad else f"equal: {', '.join(found)}", "cases": found}


def from_meta(device: str) -> float:
    """The difference of parameters after two steps: made on the meta device and initialized in shards, and made whole."""
    import hpml_compiler
    from hpml_compiler.session import session

    states = []
    for meta in (True, False):
        torch.compiler.reset()
        session.reset()
        torch.manual_seed(0)
        with torch.device("meta" if meta else "cpu"):
            model = models_of(str(HERE / "models.py")).MLP(64, 128, 2)
        model = hpml_compiler.initialize(model) if meta else model.to(device)
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", "costs": "roofline", "mesh": {"dp": 2}}) \
            if meta else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(2):
            call(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append({key: _whole(value) for key, value in model.state_dict().items()})
    return farthest(*states)

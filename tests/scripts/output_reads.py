"""Uses of outputs beside a loss, read at one moment or another, in one way or another; each may be made only then.

As in `tests.scripts.losses`, outputs of any size stay sharded. Not a family that the tests run.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn import functional as F

from tests.scripts.losses import use_of
from tests.scripts.models import inputs, sgd, targets
from tests.scripts.opinfo_outputs import small_outputs
from tests.scripts.use import Script

STEPS = 6
Read = Callable[[Any], Any]


@dataclass
class Beside(dict):
    """Outputs with names, as Hugging Face's."""

    loss: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor

    def __post_init__(self) -> None:
        super().__init__(loss=self.loss, logits=self.logits, hidden=self.hidden)


pytree.register_pytree_node(Beside, lambda b: ([b.loss, b.logits, b.hidden], None), lambda values, _: Beside(*values))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.dropout(torch.tanh(self.norm(self.first(x))), self.dropout)
        logits = self.head(hidden)
        return F.mse_loss(logits, y), logits, hidden


def _in_thread(out: Beside) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(out.logits.detach().clone()))
    thread.start()
    thread.join()
    return found[0]


def _saved(out: Beside) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(out.logits.detach(), file)
    return torch.load(io.BytesIO(file.getvalue()))


def _without_gradients(out: Beside) -> torch.Tensor:
    with torch.no_grad():
        return out.logits * 2


def _in_inference_mode(out: Beside) -> torch.Tensor:
    with torch.inference_mode():
        return (out.logits * 2).clone()


READS: dict[str, Read] = {
    "clone": lambda out: out.logits.detach().clone(),
    "both": lambda out: (out.logits.detach() + 0, out.hidden.detach() + 0),
    "thread": _in_thread,
    "pickled": lambda out: pickle.loads(pickle.dumps(out.logits.detach())),
    "saved": _saved,
    "deep-copied": lambda out: copy.deepcopy(out.logits.detach()),
    "no_grad": _without_gradients,
    "inference_mode": _in_inference_mode,
    "equal": lambda out: torch.equal(out.logits, out.logits.detach().clone()),
    "printed": lambda out: len(repr(out.logits)) > 20,
    "contained": lambda out: out.logits[0, 0].item() in out.logits,
    "mapped": lambda out: pytree.tree_map(lambda x: x.detach().abs(), out),
    "items": lambda out: {k: v.detach() + 0 for k, v in out.items()},
    "numpy": lambda out: out.logits.detach().numpy().sum().item(),
    "list": lambda out: out.logits.tolist(),
    "shape": lambda out: (out.logits.shape, out.logits.dtype, out.logits.stride(), out.logits.is_contiguous()),
    "iterated": lambda out: [row.sum().item() for row in out.logits],
    "bool": lambda out: bool((out.logits > 0).any()),
    "to": lambda out: out.logits.detach().to(torch.float32).double(),
    "cpu": lambda out: out.logits.detach().cpu() + 0,
    "data": lambda out: out.logits.data.clone(),
    "indexed": lambda out: out.logits.detach()[out.logits[:, 0] > 0],
    "written": lambda out: out.logits.detach().clone().zero_().add_(out.logits.detach()),
}


def _loop(hp: Script, read: Read, moment: str, every: int = 1) -> Any:
    torch.manual_seed(1)
    model = Net(dropout=0.25 if moment == "after backward" else 0.0).double()
    kept: list[Any] = []
    with small_outputs(wait=True):
        call, optimizer, before = hp.compile(model), sgd(model, lr=0.02), None
        for step in range(STEPS):
            optimizer.zero_grad()
            out = Beside(*call(inputs() + 0.1 * step, targets()))
            reads = step % every == 0
            if reads and moment == "at once":
                kept.append(read(out))
            out.loss.backward()
            if reads and moment == "after backward":
                kept.append(read(out))
            optimizer.step()
            if reads and moment == "after the optimizer":
                kept.append(read(out))
            if before is not None and moment == "after the next forward":
                kept.append(read(before))
            if reads and moment == "after a change by hand":
                with torch.no_grad():
                    model.head.weight.mul_(0.9)
                    model.first.bias.data.add_(0.01)
                kept.append(read(out))
            before = out
            kept.append(out.loss.item())
    return kept, model, optimizer


def _collected(hp: Script) -> Any:
    """Logits of 50 steps, read after the last."""
    torch.manual_seed(1)
    model = Net().double()
    with small_outputs(wait=True):
        call, optimizer, kept = hp.compile(model), sgd(model, lr=0.02), []
        for step in range(50):
            optimizer.zero_grad()
            loss, logits, _ = call(inputs() + 0.1 * step, targets())
            kept.append(logits.detach())
            loss.backward()
            optimizer.step()
        return torch.cat(kept), model, optimizer


MOMENTS = ("at once", "after backward", "after the optimizer", "after the next forward", "after a change by hand")
CASES: dict[str, Callable[[Script], Any]] = {
    **{
        f"{name} {moment}": lambda hp, read=read, moment=moment: _loop(hp, read, moment)
        for name, read in READS.items()
        for moment in (MOMENTS if name in ("clone", "both") else MOMENTS[2:3])
    },
    "every third step": lambda hp: _loop(hp, READS["clone"], "after the optimizer", every=3),
    "a list over 50 steps": _collected,
}
globals().update({f"use {name}": use_of(name, run, __name__) for name, run in CASES.items()})

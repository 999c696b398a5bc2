"""Outputs besides the loss: sharded, not sent until used, and every use gives one device's result."""
from __future__ import annotations

import copy
import io
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hpml_compiler
from hpml_compiler.runtime.consistency.input_check import RanksDiffer
from hpml_compiler.runtime.dtensor import lazy_outputs
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.outputs.recorded_output import RecordedOutput
from hpml_compiler.runtime.watchdog.barrier_check import RankDiverged
from passes.errors import BadInput, HpmlError
from tests.helpers.frozen import fresh
from tests.hpml_compiler.runtime.common import Doubled, full

X = torch.linspace(-1, 1, 256 * 16, dtype=torch.float64).view(256, 16).sin()
Y = torch.arange(256) % 40


@dataclass
class Found:
    loss: torch.Tensor
    logits: torch.Tensor
    rest: dict[str, Any]


class Net(nn.Module):
    def __init__(self, aliases: bool = False) -> None:
        super().__init__()
        self.aliases = aliases
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 64).double(), nn.Linear(64, 512).double()

    def forward(self, x, y):
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        rest = {"best": logits.argmax(-1), "hidden": (hidden, hidden.T, x) if self.aliases else (hidden,)}
        return Found(F.cross_entropy(logits, y), logits, rest)


def alone(call, model):
    found = call(X, Y)
    found.loss.backward()
    return [found.loss]


def metrics(call, model):
    found = call(X, Y)
    found.loss.backward()
    accuracy = (found.logits.argmax(-1) == Y).double().mean() + (found.rest["best"] == Y).double().mean()
    return [accuracy, found.logits[3, :5], found.logits.softmax(-1).max(), float(found.logits.detach()[0, 0]),
            found.logits.tolist(), len(repr(found.logits.detach())),
            torch.tensor(found.logits.detach().numpy()), F.one_hot(found.rest["best"], 512)]


def loss_outside(call, model):
    found = call(X, Y)
    again = F.cross_entropy(found.logits.float(), Y) + found.rest["hidden"][0].square().mean()
    (found.loss + again).backward()
    return [again]


def gradient_given(call, model):
    call(X, Y).logits.backward(torch.ones(256, 512).double())
    return []


def asked_gradients(call, model):
    found = call(X, Y)
    by = torch.autograd.grad(found.logits.square().sum() + found.loss, list(model.parameters()), retain_graph=True)
    through = torch.autograd.grad(found.logits.sin().sum(), [found.logits])
    found.logits.retain_grad()
    found.logits.register_hook(lambda gradient: 2 * gradient)
    found.logits.sum().backward()
    return [*by, *through, found.logits.grad]


def without_gradients(call, model):
    with torch.no_grad():
        first = call(X, Y)
        first.logits[:, 0] = 3.0
    model.eval()
    with torch.inference_mode():
        second = call(X, Y)
    with torch.no_grad():
        value = first.logits + second.logits
    return [first.logits, second.logits.argmax(-1), value, first.loss, second.rest["best"]]


def kept(call, model):
    found, sums = [], torch.zeros(512).double()
    for step in range(3):
        now = call(X * (1 + step), Y)
        found.append(now.logits.detach())
        with torch.no_grad():
            sums += now.logits.mean(0)
        now.loss.backward()
    return [torch.cat(found), torch.stack(found).mean(0), sums]


def changed(call, model):
    found = call(X, Y)
    apart = found.logits.detach()
    view = found.logits[2:4]
    scaled = found.logits.mul_(2)
    assert scaled is found.logits
    apart[0] = 1.0
    found.logits[5] = found.logits[6]
    with torch.no_grad():
        view.add_(1)
        copied = found.rest["best"].clone().add_(1)
        found.rest["best"] += 2
    (found.logits.square().sum() + found.loss).backward()
    return [found.logits, apart, view, copied, found.rest["best"]]


def saved(call, model):
    found = call(X, Y)
    file = io.BytesIO()
    torch.save({"logits": found.logits, "best": found.rest["best"]}, file)
    file.seek(0)
    read = torch.load(file)
    assert type(read["logits"]) is torch.Tensor
    return [read, copy.deepcopy(found.logits.detach()), copy.copy(found.rest["best"])]


def handed_on(call, model):
    found = call(X, Y)
    score = torch.compile(lambda z, w: (z * w).square().mean(), backend="hpml" if call is not model else "eager",
                          **({"options": {"compiler": "eager"}} if call is not model else {}))
    total = score(found.logits, torch.ones(512).double())
    (total + found.loss).backward()
    again = call(X.flip(0), Y)
    with torch.no_grad():
        again.logits.mul_(3)
    return [total, score(again.logits, torch.ones(512).double()), found.logits.sum()]


def aliases(call, model):
    model.aliases = True
    found = call(X.clone(), Y)
    hidden, turned, given = found.rest["hidden"]
    with torch.no_grad():
        hidden[0] = 1.0
        turned[1] = 2.0
        given[2] = 3.0
    return [hidden, turned, given, found.logits]


def own_function(call, model):
    found = call(X, Y)
    made = Doubled.apply(found.logits)
    (made.square().mean() + found.loss).backward()
    return [made]


def apart(call, model):
    """Detached ones share memory and nothing else; and what is changed without a gradient keeps that change."""
    found = call(X, Y)
    leaf, other = found.logits.detach().requires_grad_(), found.logits.detach()
    F.cross_entropy(leaf, Y).backward()
    found.logits.backward(leaf.grad)
    turned = found.logits.detach().t_()
    with torch.no_grad():
        found.rest["best"].unsqueeze_(0)
    other.data[1] = 7.0
    assert not other.requires_grad and not (other + 1).requires_grad
    return [leaf.grad, turned, other, found.rest["best"]]


def transformed(call, model):
    found = call(X, Y)
    rows = torch.func.vmap(lambda row, weights: row.dot(weights), (0, None))(found.logits, torch.arange(512).double())
    detached = call(X, Y).logits.detach()
    return [rows, torch.func.grad(lambda z: z.square().sum())(detached), torch.eye(512)[found.rest["best"]]]


USES = [alone, metrics, loss_outside, gradient_given, asked_gradients, without_gradients, kept, changed, saved, handed_on,
        aliases, own_function, apart, transformed]


def plain(nest):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: full(t).detach().clone(), nest)


def run_uses(rank, options, uses):
    stayed = set()
    for use in uses:
        results = []
        for split in (False, True):
            model = Net()
            call = torch.compile(model, backend="hpml", options=options) if split else model
            if split:
                first = call(X, Y)
                stayed |= {type(first.logits), type(first.rest["hidden"][0])}
                assert type(first.loss) is torch.Tensor
                del first
            results.append(plain([use(call, model), [p.grad for p in model.parameters()]]))
        torch.testing.assert_close(results[1], results[0], rtol=1e-7, atol=1e-7,
                                   msg=lambda told, use=use: f"{use.__name__}: {told}")
        fresh()
    assert stayed & {LazyOutput, RecordedOutput}


@pytest.mark.parametrize(("axis", "uses"), [("dp", USES[::2]), ("tp", USES[1::2])], ids=["dp", "tp"])
def test_every_use_is_as_on_one_device(launch, axis, uses):
    launch(run_uses, world_size=2, args=({"compiler": "eager", "mesh": {axis: 2}}, uses), timeout_s=300)


def run_unread(rank):
    """Nobody reads: nothing of its size is sent. One that is read is gathered once, however often it is used."""
    gathered = []
    joined = lazy_outputs.gathered_from_parts
    lazy_outputs.gathered_from_parts = lambda local, spec: gathered.append(tuple(spec.shape)) or joined(local, spec)
    model = Net()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}})
    for _ in range(2):
        found = call(X, Y)
        found.loss.backward()
        assert found.logits.shape == (256, 512) and found.logits.requires_grad and len(found.logits) == 256
        assert type(found.logits) is type(found.logits.detach()) is RecordedOutput
        assert type(found.rest["hidden"][0].detach()) is LazyOutput
    assert not gathered
    (graph,) = hpml_compiler.last_plan().graphs
    assert not [r for r in graph.redistributions if r.shape == (256, 512)]
    assert found.logits.sum() + found.logits.mean() + found.logits.detach().max() != 0
    assert gathered == [(256, 512)]


def test_what_is_not_read_is_not_sent(launch):
    launch(run_unread, world_size=2)


def run_alone(rank):
    model = Net()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}})
    call(X, Y).loss.backward()
    found = call(X, Y)
    found.logits.sum()
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RankDiverged, match=r"rank 0 is alone in reading output . \(.*\) of graph_0, call 2: rank 1 is "):
            print(found.rest["best"])
        assert time.monotonic() - start < 30
    else:
        time.sleep(1)
        with pytest.raises(RankDiverged, match="rank 1 is alone in reading output .* of graph_0, call 2"):
            found.rest["hidden"][0].sum()
    dist.barrier()
    found, told = call(X, Y), []

    def read_elsewhere():
        with pytest.raises(HpmlError, match="in another thread than the one that called the model") as error:
            found.logits.sum()
        told.append(error)

    thread = threading.Thread(target=read_elsewhere)
    thread.start()
    thread.join()
    assert told
    zero = torch.compile(lambda z, w: (w.zero_(), z.sum()), backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}})
    for output in (found.logits, found.rest["hidden"][0]):
        with pytest.raises(BadInput, match="shares memory"), torch.no_grad():
            zero(output, output.detach())
    found = call(X, Y)
    with pytest.raises(RanksDiffer, match="is not the same on all ranks|the gradient of output"):
        F.cross_entropy(found.logits, (Y + rank) % 40).backward()


def test_what_would_be_wrong_is_told(launch):
    launch(run_alone, world_size=2)

"""Rows of a batch: each rank holds half, and every line gives what the whole batch gives."""
from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hpml_compiler.runtime.batch.batch_shard import BatchShard, shard_batch
from tests.hpml_compiler.runtime.common import assert_close, full, mlp
from tests.hpml_compiler.runtime.toy import Toy

STAY_ROWS = ["x.to('cpu')", "x.to(torch.float64)", "x.double()", "x / 4", "x + x", "(x - 1) * 2", "x.contiguous()",
             "x.detach().clone()", "y.float()", "-x", "copy.deepcopy(x)", "x.flatten(1)"]
BECOME_WHOLE = ["x.view(-1)", "x[2]", "x[:, 1]", "x.sum()", "x.mean(1)", "x == 3", "torch.cat([x, x])", "x[y > 3]",
                "x @ torch.ones(3, 2)", "F.one_hot(y, 8)", "y + torch.arange(8)", "torch.ones(8) * y",
                "x.T", "F.pad(y, (0, 1), value=-100)", "x.max(1)[0]", "torch.where(x > 2, x, torch.zeros_like(x))",
                "torch.tensor(x.tolist())", "torch.from_numpy(x.numpy())", "list(x)[5]"]


def run_eager(rank):
    mesh = init_device_mesh("cpu", (2,))
    x, y = torch.arange(24.0).view(8, 3), torch.arange(8)
    ours = {"x": shard_batch(x, mesh), "y": shard_batch(y, mesh)}
    place = {"torch": torch, "F": F, "copy": copy}
    for expressions, kind in ((STAY_ROWS, BatchShard), (BECOME_WHOLE, torch.Tensor)):
        for expression in expressions:
            value, expected = eval(expression, {**place, **ours}), eval(expression, {**place, "x": x, "y": y})
            assert type(value) is kind, expression
            torch.testing.assert_close(full(value), expected)
    rows = ours["x"]
    assert (rows.shape, rows.size(0), len(rows), rows.dim(), rows.numel()) == ((8, 3), 8, 8, 2, 24)
    assert rows.to_local().untyped_storage().nbytes() == 48 and rows.to_local().storage_offset() == 0
    labels = ours["y"]
    labels[labels == 3] = -100
    assert type(labels) is BatchShard
    assert full(labels).tolist() == [0, 1, 2, -100, 4, 5, 6, 7]
    parameter = nn.Parameter(torch.zeros(8, 3))
    with torch.no_grad():
        parameter.copy_(rows)
    assert_close(parameter, x)


def test_rows_in_eager_code(launch):
    launch(run_eager, world_size=2)


WRITES_TO_VIEWS = ["x[2].fill_(7)", "x[:, 1].sub_(3)", "x.view(-1)[5:9].zero_()", "x[..., 0].mul_(2)", "x.T[1].add_(1)",
                   "x.chunk(4)[3].neg_()", "x.unbind(1)[2].copy_(torch.ones(8))", "x.reshape(4, 6)[1, 2:4] = 9",
                   "x.numpy().sum(); x[0].zero_()", "v = x[3]; x.mul_(2); v.add_(1); x.add_(v.sum())",
                   "v, w = x[:, 0], x[5]; v.zero_(); w.add_(v.sum() + 1); x[5, 0] = w[1]", "x.detach().select(0, 6).fill_(4)",
                   "v = x[1]; x.add_(x); v.mul_(3); seen.append(v + x.sum())", "x[0][1].fill_(5)", "x.data[3].zero_()",
                   "v = x.detach(); x[5].fill_(2); v.add_(1); x[0].sub_(v[5])", "x[x > 4] = 0; x[0].fill_(1)"]


def run_views(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = torch.compile(nn.Linear(3, 3), backend="hpml", options={"compiler": "eager"})
    for line in WRITES_TO_VIEWS:
        results = []
        for split in (False, True):
            x = torch.arange(24.0).view(8, 3).sin()
            place = {"torch": torch, "seen": [], "x": shard_batch(x, mesh) if split else x.clone()}
            exec(line, place)
            results.append([full(place["x"]), full(place["x"] + 1), model(place["x"]).detach(), *place["seen"]])
        for ours, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(full(ours), full(expected), msg=lambda text, line=line: f"{line}: {text}")


def test_what_is_written_to_views_of_rows_reaches_them(launch):
    launch(run_views, world_size=2)


class Keywords(nn.Module):
    """Looks at shapes and devices, and takes its labels by keyword, as models of the HF library do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, inputs=None, labels=None, flag=True):
        if inputs.dim() == 2 and inputs.size(-1) == 6 and flag:
            inputs = inputs * torch.ones(inputs.shape[0], 1, device=inputs.device)
        logits = self.body(inputs)
        loss = F.cross_entropy(logits.view(-1, 4), labels.to(logits.device).view(-1))
        return {"loss": loss, "logits": logits, "labels as they come": F.cross_entropy(logits, labels)}


def run_compiled(rank, aot):
    mesh = init_device_mesh("cpu", (2,))
    model, reference = Keywords(), Keywords()
    backend = Toy(aot=aot)
    call = torch.compile(model, backend=backend)
    graphs = []
    for rows in (8, 8, 4, 12, 16):
        generator = torch.Generator().manual_seed(rows)
        inputs, labels = torch.randn(rows, 6, generator=generator), torch.randint(0, 4, (rows,), generator=generator)
        out = call(inputs=shard_batch(inputs, mesh), labels=shard_batch(labels, mesh))
        expected = reference(inputs=inputs, labels=labels)
        assert type(out["loss"]) is type(out["logits"]) is torch.Tensor
        for key in out:
            assert_close(out[key], expected[key])
        out["loss"].backward()
        expected["loss"].backward()
        loss = F.cross_entropy(out["logits"], shard_batch(labels, mesh))  # outside: gathers the labels
        assert_close(loss, expected["loss"])
        graphs.append(backend.compiles)
    assert graphs == [1, 1, 2, 2, 2]  # the second with a symbolic batch size
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    return [str(gm.graph) for gm in backend.graphs], [list(placed) for placed in backend.placed]


def test_rows_in_compiled_code(launch):
    for aot in (False, True):
        first, second = launch(run_compiled, world_size=2, args=(aot,))
        assert first == second  # all ranks see one graph, with the same inputs


def run_float_gradient(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.linspace(-1, 1, 24).view(4, 6)
    model, reference = mlp(), mlp()
    rows, plain = shard_batch(x, mesh).requires_grad_(), x.clone().requires_grad_()
    torch.compile(model, backend=Toy(aot=True))(rows).pow(2).sum().backward()
    reference(plain).pow(2).sum().backward()
    assert rows.grad.to_local().shape == (2, 6)
    assert_close(rows.grad, plain.grad)


def test_gradient_of_rows(launch):
    launch(run_float_gradient, world_size=2)

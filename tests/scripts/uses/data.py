"""Where batches come from: loaders, plain or distributed, of all shapes."""
from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.models import adamw, classes, inputs, mlp, sgd, step, targets, tokens, train
from tests.scripts.use import use


def _epochs(hp, loader, model=None, epochs=2):
    model = model or mlp()
    call, optimizer, losses = hp.compile(model), adamw(model), []
    for _ in range(epochs):
        losses += [step(call, optimizer, x, y) for x, y in loader]
    return losses, model, optimizer


def _pairs(rows=24):
    return TensorDataset(inputs(rows), targets(rows))


@use
def a_loader_with_a_smaller_last_batch(hp):
    return _epochs(hp, DataLoader(_pairs(22), batch_size=8))


@use
def distributed_with_a_smaller_last_batch(hp):
    """The last batch has an odd number of rows."""
    return _epochs(hp, hp.distribute(DataLoader(_pairs(21), batch_size=8)))


@use
def distributed_with_batch_norm(hp):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    return _epochs(hp, hp.distribute(DataLoader(_pairs(), batch_size=8)), model)


def _synchronized(hp, model, group=None):
    """torch's own layer asks for a GPU where there are several ranks; on one device it is BatchNorm."""
    return model if hp.mesh is None else nn.SyncBatchNorm.convert_sync_batchnorm(model, group)


@use
def distributed_with_synchronized_batch_norm(hp):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 4))
    model = _synchronized(hp, model)
    seen = _epochs(hp, hp.distribute(DataLoader(_pairs(), batch_size=8)), model)
    return *seen, model.eval()(inputs()), hp.compile(copy.deepcopy(model))(inputs())


@use(refused="(?s)process group that has not all ranks.*leave process_group out")
def batch_norm_synchronized_among_some_ranks(hp):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    group = None if hp.mesh is None else dist.new_subgroups(1)[0]
    return train(hp, _synchronized(hp, model, group))


@use
def distributed_and_accumulated(hp):
    model = mlp()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for number, (x, y) in enumerate(hp.distribute(DataLoader(_pairs(32), batch_size=8))):
        loss = F.mse_loss(call(x), y) / 2
        loss.backward()
        losses.append(loss.item())
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model, optimizer


@use
def distributed_with_metrics(hp):
    """The script looks at the rows: accuracy, a mean over unmasked targets."""
    model = mlp()
    call, optimizer, seen = hp.compile(model), adamw(model), []
    data = TensorDataset(inputs(16), classes(16))
    for x, y in hp.distribute(DataLoader(data, batch_size=8)):
        out = call(x)
        mask = y != 2
        loss = (F.cross_entropy(out, y, reduction="none") * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.item(), (out.argmax(-1) == y).double().mean().item(), x.mean(), y.max(), len(x), x[0], y.tolist()]
    return seen, model


@use
def distributed_rows_prepared(hp):
    """Casts and arithmetic on the batch before it goes into the model."""
    model = mlp()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for x, y in hp.distribute(DataLoader(TensorDataset(inputs(16).float(), targets(16)), batch_size=8)):
        x = (x.to("cpu", non_blocking=True).double() - 0.1) / 0.5
        x = x.view(8, -1) + torch.zeros(16)
        losses.append(step(call, optimizer, x, y.contiguous()))
    return losses, model


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor

    def to(self, device):
        return Batch(self.x.to(device), self.y.to(device))


@use
def padded_to_the_longest(hp):
    """Lengths of their own in each batch."""
    rows = [tokens(1, 2 + i % 3)[0] for i in range(8)]

    def collate(batch):
        return nn.utils.rnn.pad_sequence(batch, batch_first=True)

    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8, padding_idx=0), nn.Linear(8, 4)

        def forward(self, ids):
            return self.head(self.embed(ids).sum(1))

    model = Pools()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for ids in hp.distribute(DataLoader(rows, batch_size=2, collate_fn=collate)):
        optimizer.zero_grad()
        loss = call(ids).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@use
def evaluates_on_another_loader(hp):
    model = mlp()
    call, optimizer, seen = hp.compile(model), adamw(model), []
    for _ in range(2):
        for x, y in hp.distribute(DataLoader(_pairs(), batch_size=8)):
            step(call, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            right = sum(F.mse_loss(call(x), y, reduction="sum").item() for x, y in DataLoader(_pairs(10), batch_size=4))
        seen.append(right / 10)
        model.train()
    return seen, model, optimizer


class Averaged(nn.BatchNorm1d):
    """Dynamo compiles it by itself: its number of batches is read, which breaks the graph of a loop over layers."""

    def forward(self, x):
        return super().forward(x)


@use
def batch_norm_with_a_cumulative_average(hp):
    model = nn.Sequential(nn.Linear(16, 16), Averaged(16), nn.Tanh(), Averaged(16, momentum=None), nn.Linear(16, 4))
    return *train(hp, model), model.eval()(inputs())

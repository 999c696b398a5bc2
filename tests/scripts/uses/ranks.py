"""Ranks that differ, wrappers of other libraries, and other uses of a trained model."""
from __future__ import annotations

from itertools import chain

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.scripts.models import adamw, inputs, mlp, sgd, step, targets, tokens, train
from tests.scripts.use import use


@use
def an_unseeded_second_model(hp):
    """The first model makes the generators equal, so that what is drawn later is too."""
    torch.manual_seed(0 if hp.mesh is None else hp.rank)
    first, second = mlp(), mlp(hidden=16)
    return train(hp, first), train(hp, second), torch.rand(2)


def _own_rows(hp, count=32):
    """On one device the rows of both ranks' batches, in order of ranks."""
    data = TensorDataset(inputs(count), targets(count))
    samplers = [DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=3) for rank in range(2)]
    if hp.mesh is None:
        order = list(chain.from_iterable(chain(one, two) for one, two in zip(*(_parts(list(s), 4) for s in samplers))))
        return DataLoader(data, batch_size=8, sampler=order)
    return hp.distribute(DataLoader(data, batch_size=4, sampler=samplers[hp.rank]))


def _parts(rows, size):
    return [rows[at:at + size] for at in range(0, len(rows), size)]


@use(generator=False)
def a_sampler_that_shares_out_rows(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    return [step(call, optimizer, x, y) for x, y in _own_rows(hp)], model, optimizer


@use(generator=False)
def a_sampler_with_an_uneven_end(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    return [step(call, optimizer, x, y) for x, y in _own_rows(hp, 26)], model, optimizer


@use(generator=False)
def a_mean_over_uneven_masks(hp):
    """Tokens that count are spread unevenly over the ranks' rows."""
    model = mlp()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for x, y in _own_rows(hp):
        mask = (y[:, 0] > 0.2).double()
        optimizer.zero_grad()
        loss = ((call(x) - y).square().mean(1) * mask).sum() / mask.sum().clamp(min=1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@use(refused=r"(?s)rank.*next step")
def other_batches_on_each_rank(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    shift = 0 if hp.mesh is None else hp.rank
    return [step(call, optimizer, inputs() + shift, targets()) for _ in range(3)]


@use(refused=r"(?s)rank.*next step")
def other_batches_in_a_distributed_loader(hp):
    shift = 0 if hp.mesh is None else hp.rank
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    loader = DataLoader(TensorDataset(inputs() + shift, targets()), batch_size=8)
    return [step(call, optimizer, x, y) for x, y in hp.distribute(loader)]


@use
def scripted_shapes_of_memory(hp):
    """What tools ask of tensors: their storage, its size, whether two share it."""
    model = mlp()
    seen = train(hp, model)
    w = model[0].weight.detach()
    return seen, w.untyped_storage().nbytes() > 0, w.data_ptr() == model[0].weight.data_ptr(), w.element_size(), w.stride()


@use
def safetensors_of_a_trained_model(hp):
    from safetensors.torch import load, save

    model = mlp()
    seen = train(hp, model)
    return seen, load(save({k: v.contiguous() for k, v in model.state_dict().items()}))


@use
def shares_memory(hp):
    model = mlp()
    seen = train(hp, model)
    model.share_memory()
    return seen, model


@use(refused={"stages": "with a data-dependent shape"})
def sizes_that_depend_on_data(hp):
    """With Dynamo told to trace them."""
    class Selects(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x[x[:, 0] > 0]).square().sum()

    model = Selects()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call, optimizer, losses = hp.compile(model), sgd(model, lr=0.01), []
        for number in range(2):
            optimizer.zero_grad()
            loss = call(inputs().roll(number, 1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


@use
def one_model_per_task_with_an_embedding_in_common(hp):
    table = nn.Embedding(16, 8)
    heads = [nn.Linear(8, 4), nn.Linear(8, 2)]
    calls = [hp.compile(nn.Sequential(table, head)) for head in heads]
    optimizer = torch.optim.SGD([*table.parameters(), *heads[0].parameters(), *heads[1].parameters()], 0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum(call(tokens()).square().mean() for call in calls)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, table, *heads

"""Rows that each rank has of its own -> losses and gradients of all of them together."""
from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpml_compiler
from hpml_compiler.runtime.batch.batch_shard import BatchShard
from hpml_compiler.runtime.batch.distributed_loader import sharing_sampler
from passes.errors import BadInput
from tests.hpml_compiler.runtime.common import full

TOKENS, WIDTH = 7, 6


class Tagger(nn.Module):
    """Its loss is a mean over the tokens that count, so ranks with fewer of them weigh less."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.head(self.embed(ids).tanh()).flatten(0, 1), labels.flatten())


def data(rows=22, length=5):
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, TOKENS, (rows, length), generator=generator) for _ in range(2))
    labels[torch.rand(rows, length, generator=generator) < 0.5] = -100
    labels[::3, 1:] = -100
    return TensorDataset(ids, labels)


def models(**options):
    torch.manual_seed(0)
    reference = Tagger().double()
    ours = copy.deepcopy(reference)
    return reference, ours, torch.compile(ours, backend="hpml", options={"compiler": "eager", **options})


def assert_same_step(reference, ours, compiled, batch, global_batch):
    loss, expected = compiled(*batch), reference(*global_batch)
    torch.testing.assert_close(loss, expected)
    for model, value in ((ours, loss), (reference, expected)):
        model.zero_grad()
        value.backward()
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), theirs.grad)
        with torch.no_grad():
            mine.sub_(mine.grad, alpha=0.1)
            theirs.sub_(theirs.grad, alpha=0.1)


def joined(parts):
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def run_ddp_script(rank):
    dataset, trio = data(), models()
    loaders = [DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, r, shuffle=True, seed=3)) for r in range(2)]
    loader = hpml_compiler.distribute(loaders[rank])
    steps = 0
    for epoch in range(2):
        for other in loaders:
            other.sampler.set_epoch(epoch)
        loader.sampler.set_epoch(epoch)
        for batch, *parts in zip(loader, *loaders, strict=True):  # 4, 4 and 3 rows of each rank
            assert type(batch[0]) is BatchShard and batch[0].to_local().equal(parts[rank][0])
            assert_same_step(*trio, batch, joined(parts))
            steps += 1
    assert steps == 6


def run_uneven(rank):
    """Ranks with other numbers of rows in the last batch, and of batches: nothing is lost."""
    ids, labels = data().tensors
    split = [[slice(0, 4), slice(4, 8), slice(8, 11)], [slice(11, 15), slice(15, 16), slice(0, 0)]]
    batches = [[(ids[s], labels[s]) for s in part if s.stop] for part in split]
    trio, seen = models(), []
    for number, batch in enumerate(hpml_compiler.distribute(batches[rank], rows="own")):
        parts = [part[number] for part in batches if number < len(part)]
        seen.append((type(batch[0]), batch[0].shape[0]))
        assert_same_step(*trio, batch, joined(parts))
    assert seen == [(BatchShard, 8), (torch.Tensor, 5), (torch.Tensor, 3)]
    with pytest.raises(BadInput, match="rank 1 has no batch"):
        list(hpml_compiler.distribute([] if rank else [{"x": torch.ones(2)}], rows="own"))


def run_one_batch(rank):
    """From a hook, as somebody does who has no hold of the loader; and what is no row stays."""
    ids, labels = data().tensors
    mine = slice(4 * rank, 4 * rank + 4)
    reference, ours, compiled = models(mesh={"dp": 2})
    compiled.register_forward_pre_hook(lambda _, batch: hpml_compiler.distribute_batch(batch, rows="own"))
    assert_same_step(reference, ours, compiled, (ids[mine], labels[mine]), (ids[:8], labels[:8]))
    given = {"x": ids[mine], "scale": torch.tensor(2.0), "text": "a"}
    once = hpml_compiler.distribute_batch(given, rows="own")
    twice = hpml_compiler.distribute_batch(once, rows="own")
    assert once["x"].shape == (8, 5) and once["scale"] is given["scale"] and once["text"] == "a"
    assert twice["x"] is once["x"] and torch.equal(full(once["x"]), ids[:8])
    same = hpml_compiler.distribute_batch({"x": ids[:8]}, rows="same")
    assert torch.equal(same["x"].to_local(), ids[mine])
    odd = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)[:, 1:]
    rows = hpml_compiler.distribute_batch(odd, rows="own")
    assert rows.shape == (4, 2, 4, 4) and torch.equal(full(rows)[2 * rank:2 * rank + 2], odd)


def augmented(rank):
    for _ in range(2):
        yield torch.rand(2 + 2 * rank)[:2]  # ranks draw unlike many numbers for their rows


def run_random_numbers(rank):
    """What a rank draws for its own rows changes nothing of what the script draws, which all ranks must draw alike."""
    torch.manual_seed(rank)
    own = [*augmented(rank)]
    torch.manual_seed(rank)
    batches = iter(hpml_compiler.distribute(Again(augmented, rank), rows="own"))
    for expected in own:
        before = torch.get_rng_state()
        rows = next(batches)
        assert torch.equal(rows.to_local(), expected) and torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(7)


class Again:
    def __init__(self, make, *args):
        self.make, self.args = make, args

    def __iter__(self):
        return self.make(*self.args)


def run_padding(rank):
    """Other lengths on the ranks: said, or filled up."""
    dataset = data(rows=8)
    ids, labels = dataset.tensors
    mine = (ids[4 * rank:4 * rank + 4, :5 - rank], labels[4 * rank:4 * rank + 4, :5 - rank])
    with pytest.raises(BadInput, match=r"`0` is \[4, 5\] on rank 0, \[4, 4\] on rank 1(.|\n)*pad="):
        hpml_compiler.distribute_batch(mine, rows="own")
    labels[4:, 4] = -100
    for batch in hpml_compiler.distribute([mine], rows="own", pad={"0": 1, "1": -100}):
        assert_same_step(*models(), batch, (ids, labels))


def run_errors(rank):
    with pytest.raises(BadInput, match="`x` has 4 rows but `weights` 3"):
        hpml_compiler.distribute_batch({"x": torch.ones(4), "weights": torch.ones(3)}, rows="own")
    with pytest.raises(BadInput, match="batches have different structures on different ranks: `b`"):
        hpml_compiler.distribute_batch({"ab"[rank]: torch.ones(4)}, rows="own")
    with pytest.raises(BadInput, match="batches have different structures on different ranks: `1` .* on rank 1 is not in"):
        hpml_compiler.distribute_batch([torch.ones(4)] * (1 + rank), rows="own")
    with pytest.raises(BadInput, match="rank 1 has 1 tensors in its batch, rank 0 2"):
        hpml_compiler.distribute_batch([torch.ones(4)] * (2 - rank), rows="own")
    with pytest.raises(BadInput, match="requires a gradient"):
        hpml_compiler.distribute_batch(torch.ones(4, requires_grad=True), rows="own")
    dataset = data()
    for count, rows, message in ((4, None, "among 4 ranks, but there are 2"), (2, "same", "remove rows='same' or the sampler")):
        loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, count, rank))
        with pytest.raises(BadInput, match=message):
            next(iter(hpml_compiler.distribute(loader, rows=rows)))
    with pytest.raises(BadInput, match="rows='mine' is not known"):
        hpml_compiler.distribute([], rows="mine")
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("hpml_compiler.runtime.batch.distributed_loader").addHandler(handler)
    list(hpml_compiler.distribute([torch.ones(4)], rows="own"))
    assert len(records) == 1 - rank and all("the same on every rank" in r.getMessage() for r in records)


def run_all(rank):
    for case in (run_ddp_script, run_uneven, run_one_batch, run_random_numbers, run_padding, run_errors):
        torch._dynamo.reset()
        case(rank)


@pytest.mark.timeout(200)
def test_rows_of_each_rank(launch):
    launch(run_all, world_size=2, timeout_s=180)


def test_samplers_that_share_out_rows_are_found():
    dataset = data()
    sampler = DistributedSampler(dataset, 2, 0)
    assert sharing_sampler(DataLoader(dataset, 4)) is None and sharing_sampler([1, 2]) is None
    assert sharing_sampler(DataLoader(dataset, 4, sampler=sampler)) == 2
    batches = torch.utils.data.BatchSampler(sampler, 4, False)
    assert sharing_sampler(DataLoader(dataset, batch_sampler=batches)) == 2
    around = SimpleNamespace(base_dataloader=DataLoader(dataset, batch_sampler=SimpleNamespace(num_processes=3)))
    assert sharing_sampler(around) == 3


def test_one_rank_keeps_its_batch(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    batch = {"x": torch.ones(3)}
    assert hpml_compiler.distribute_batch(batch, rows="own") is batch

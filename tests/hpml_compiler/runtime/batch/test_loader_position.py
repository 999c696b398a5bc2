"""A loader stopped in the middle of a pass -> another goes on there: the same batches, then the same random numbers."""
from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, WeightedRandomSampler

import hpml_compiler
from hpml_compiler.checkpoints.json_state import StateEncoder, decode
from hpml_compiler.checkpoints.random_states import random_states, restore_random_states

ROWS, BATCH = 24, 4


class Augmented(Dataset):
    """Rows with noise from all three generators."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


def shuffled():
    return DataLoader(Augmented(), BATCH, shuffle=True)


def with_generator():
    return DataLoader(Augmented(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


def in_workers():
    return DataLoader(Augmented(), BATCH, shuffle=True, num_workers=1)


def weighted():
    return DataLoader(Augmented(), BATCH, sampler=WeightedRandomSampler([1.0, 2.0] * (ROWS // 2), ROWS))


def batch_sampler():
    return DataLoader(Augmented(), batch_sampler=BatchSampler(RandomSampler(range(ROWS)), BATCH, drop_last=True))


def stateful():
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Augmented(), BATCH, shuffle=True)


def draws(loader, passes, stop=None):
    """Batches of the passes, with a mask that the model draws in each step. stop: (pass, batch) after which to end."""
    found = []
    for number in range(loader.passes, passes):
        assert loader.passes == number
        for k, batch in enumerate(loader):
            found.append(torch.cat([batch.flatten(), torch.rand(3)]).tolist())
            if stop == (number, k):
                return found
    return found


@pytest.mark.parametrize("stop", [(1, 2), (1, ROWS // BATCH - 1)], ids=["middle", "end"])
@pytest.mark.parametrize("make", [shuffled, with_generator, in_workers, weighted, batch_sampler, stateful])
def test_goes_on_where_it_was(make, stop):
    def seed():
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)

    seed()
    whole = draws(hpml_compiler.distribute(make()), 3)
    seed()
    loader = hpml_compiler.distribute(make())
    before = draws(loader, 3, stop)
    assert before == whole[:len(before)]
    state, states = StateEncoder(inline=True).encode(loader.state_dict(), "loader"), random_states()
    torch.manual_seed(9)
    again = hpml_compiler.distribute(make())
    again.load_state_dict(decode(state, {}))
    restore_random_states(states)
    assert draws(again, 3) == whole[len(before):]


def test_a_pass_that_was_left_counts():
    loader = hpml_compiler.distribute(shuffled())
    next(iter(loader))
    assert loader.passes == 0
    next(iter(loader))
    assert loader.passes == 1
    again = hpml_compiler.distribute(DataLoader(range(4), 4))
    again.load_state_dict({**loader.state_dict(), "batches": 5})
    with pytest.raises(Exception, match="fewer than the 5 batches"):
        next(iter(again))


def run_own(rank):
    """Each rank's rows, augmented by generators of its own."""
    def make():
        rows = Augmented()
        return hpml_compiler.distribute(DataLoader(rows, BATCH, sampler=DistributedSampler(rows, seed=1)), rows="own")

    def local(loader, passes, stop=None):
        found = []
        for number in range(loader.passes, passes):
            for k, batch in enumerate(loader):
                found.append((batch.to_local().flatten().tolist(), torch.rand(3).tolist()))
                if stop == (number, k):
                    return found
        return found

    torch.manual_seed(0)
    np.random.seed(rank)
    random.seed(rank)
    states = random_states()
    whole = local(make(), 2)
    restore_random_states(states)
    loader = make()
    before = local(loader, 2, (0, 1))
    state, states = StateEncoder(inline=True).encode(loader.state_dict(), "loader"), random_states()
    torch.manual_seed(9)
    again = make()
    again.load_state_dict(decode(state, {}))
    restore_random_states(states)
    assert before + local(again, 2) == whole
    dist.barrier()


def test_each_rank_goes_on_with_rows_of_its_own(launch):
    launch(run_own)

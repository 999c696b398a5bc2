"""A dim whose inner factor is split: the whole -> the parts of all ranks, and the blocks of a checkpoint -> the whole."""
from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hpml_compiler.runtime.placements.inner_shard import (
    InnerShard,
    blocks_along,
    chunk_offsets,
    inner_part,
    local_shape,
    put_together,
)
from hpml_compiler.session.session import from_dtensor, to_dtensor


@dataclass
class Place:
    """One rank of a mesh: as much of a DeviceMesh as says where it is."""

    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]

    def size(self, axis):
        return self.sizes[axis]

    def get_local_rank(self, axis):
        return self.coordinates[axis]


def ranks(*sizes):
    return [Place(sizes, each) for each in itertools.product(*map(range, sizes))]


SPLITS = [
    ((12, 5), (2,), (InnerShard(0, 3),)),
    ((5, 12), (4,), (InnerShard(1, 3),)),
    ((24,), (2, 2), (InnerShard(0, 3), InnerShard(0, 3))),
    ((12, 8), (2, 2), (InnerShard(0, 3), InnerShard(1, 2))),
    ((12, 8), (2, 2), (Replicate(), InnerShard(0, 3))),
]


@pytest.mark.parametrize(("shape", "sizes", "placements"), SPLITS)
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_hold_each_element_once_and_lie_in_the_order_of_the_whole(shape, sizes, placements, transposed):
    value = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if transposed:
        value = value.t().contiguous().t()
    found, copies = torch.zeros_like(value), 0
    for place in ranks(*sizes):
        part = inner_part(value, place, placements)
        assert part.shape == local_shape(shape, place, placements)
        assert [*torch.tensor(part.stride()).argsort()] == [*torch.tensor(value.stride()).argsort()]
        for whole, offset, size in chunk_offsets(placements, place, part.shape):
            block = part[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
            at = tuple(slice(o, o + n) for o, n in zip(whole, size, strict=True))
            assert torch.equal(value[at], block)
            found[at] += 1
        copies += part.numel()
    assert found.eq(copies // value.numel()).all()


@pytest.mark.parametrize(("dim", "outer"), [(0, 3), (1, 2)])
def test_parts_put_together_are_the_whole(dim, outer):
    value = torch.randn(12, 8)
    placement = InnerShard(dim, outer)
    parts = torch.stack([inner_part(value, place, [placement]) for place in ranks(2)])
    assert torch.equal(put_together(parts, placement), value)


def test_a_size_must_be_a_multiple_of_its_blocks():
    place = Place((2, 4), (0, 0))
    assert blocks_along(0, place, [InnerShard(0, 3), InnerShard(0, 3)]) == 24
    assert blocks_along(0, place, [Shard(1), InnerShard(0, 3)]) == 12
    assert blocks_along(1, place, [Shard(1), InnerShard(0, 3)]) == 2


def test_placements_are_values():
    placements = (Replicate(), Shard(1), InnerShard(0, 3))
    assert to_dtensor(from_dtensor(placements)) == placements == pickle.loads(pickle.dumps(placements))
    assert len({InnerShard(0, 3), InnerShard(0, 3), InnerShard(0, 2), Shard(0)}) == 3

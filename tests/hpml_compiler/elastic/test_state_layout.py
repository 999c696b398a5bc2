"""Blocks of four ranks -> which are sent, who holds them, and what is missing when ranks are lost."""
from __future__ import annotations

import pytest
import torch

from hpml_compiler.elastic.state_layout import Block, Holding, RankBlocks, StateLayout


def _layout(redundancy: int, local_ranks: int = 4) -> StateLayout:
    """A vector sharded over four ranks; a matrix over two, each half twice; a count that all have."""
    count = Block("count", torch.float32, (), (), ())
    return StateLayout([RankBlocks((
        Block("vector", torch.float16, (8,), (2 * rank,), (2,)), count,
        Block("matrix", torch.float32, (4, 4), (2 * (rank // 2), 0), (2, 4))), {})
        for rank in range(4)], redundancy, local_ranks)


def _names(layout: StateLayout, part) -> list[str]:
    return [block.name for block in layout.blocks(0, part)]


def test_blocks_are_sent_that_too_few_ranks_have() -> None:
    one, two = _layout(1), _layout(2)
    assert _names(one, "sent") == ["vector"] and _names(one, "kept") == ["count", "matrix"]
    assert _names(two, "sent") == ["matrix", "vector"] and one.bytes(0, "sent") == 4 and two.bytes(0, "sent") == 36
    assert not StateLayout([RankBlocks(one.ranks[0].blocks[1:2], {})] * 4, 1, 4).is_sharded


@pytest.mark.parametrize(("redundancy", "local_ranks", "holders"), [
    (1, 4, [1]), (1, 2, [2]), (2, 2, [2, 1]), (3, 1, [1, 2, 3])])
def test_holders_are_on_other_nodes_first(redundancy: int, local_ranks: int, holders: list[int]) -> None:
    layout = _layout(redundancy, local_ranks)
    assert layout.holders(0) == holders
    assert all(0 in layout.held_by(holder) for holder in holders)


@pytest.mark.parametrize(("left", "missing"), [
    ([0, 1, 2, 3], []), ([0, 2, 3], []), ([2, 0, 3], []), ([0, 2], []), ([1, 3], []), ([0, 3], [1]), ([2], [0, 1, 3]),
    ([0, 1], [2, 3]),
])
def test_ranks_that_are_missing(left: list[int], missing: list[int]) -> None:
    layout = _layout(1)
    taken, lost = layout.sources([None, *(Holding(rank, tuple(layout.held_by(rank))) for rank in left)])
    assert lost == missing
    assert all(1 <= index <= len(left) and rank in (left[index - 1], (left[index - 1] - 1) % 4) for index, rank, _ in taken)
    assert layout.sources([Holding(rank, ()) for rank in left])[1] == sorted({0, 1, 2, 3} - {*left}), "nothing has arrived"

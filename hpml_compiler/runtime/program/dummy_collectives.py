"""Dummy collectives of a failed rank: it joins the collectives that its peers wait for, with zeros.

Results computed from these are meaningless, so the caller has all ranks agree that one has failed before any of them uses its
results. The collectives that are left follow from the graph, and from how many each process group has begun.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes import compat
from passes.graph.fx_nodes import WAIT, is_collective


@dataclass(frozen=True)
class DummyCollective:
    """A collective of a graph with its arguments; fakes replace tensors."""

    target: Any
    args: tuple[Any, ...]
    group: str

    def begin(self, device: torch.device) -> torch.Tensor:
        def zeros(fake: Any) -> torch.Tensor:
            return torch.zeros(tuple(map(int, fake.shape)), dtype=fake.dtype, device=device)

        return self.target(*compat.pytree.tree_map_only(torch.Tensor, zeros, self.args))


def collectives_of(gm: GraphModule | None) -> tuple[DummyCollective, ...]:
    """All collectives of a graph, in the order in which its ranks begin them."""
    def fake(node: Node) -> Any:
        return node.meta["val"]

    return tuple(DummyCollective(node.target, compat.pytree.tree_map_only(Node, fake, node.args), str(node.args[-1]))
                 for node in (() if gm is None else gm.graph.nodes) if is_collective(node.target) and node.target is not WAIT)


def begun(collectives: Sequence[DummyCollective]) -> dict[str, int]:
    """Number of collectives that each of their process groups has begun so far."""
    return {name: compat.collectives_begun(name) for name in dict.fromkeys(each.group for each in collectives)}


def take_part(collectives: Sequence[DummyCollective], before: Mapping[str, int], device: torch.device) -> None:
    """Join the collectives that are left of a failed call. before: `begun`, taken before the call."""
    done = Counter({name: compat.collectives_begun(name) - count for name, count in before.items()})
    for each in collectives:
        if done[each.group] > 0:
            done[each.group] -= 1
        else:
            WAIT(each.begin(device))

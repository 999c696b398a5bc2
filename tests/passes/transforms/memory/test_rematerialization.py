"""A joint graph and its saved values -> a backward that recomputes the rest, with the same results."""
from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from passes import compat
from passes.analyses.flops import Flops
from passes.analyses.shapes import Shapes
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM, CheckpointDecision
from passes.errors import HpmlError
from passes.manager import PassManager
from passes.presets import rematerializing
from tests.passes.traced import joint_graph


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.layers, self.dropout = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), dropout

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), self.dropout)
        return x.square().sum()


class Waves(nn.Module):
    """With a view that no list of views names: the conjugate of a complex number."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.ones(5))

    def forward(self, x):
        spectrum = torch.fft.rfft(torch.tanh(self.layer(x)))
        return (spectrum.conj() * spectrum * self.weight).abs().sum()


def kept(names: set[str]) -> CheckpointDecision:
    return CheckpointDecision(frozenset(names), 0, 0.0, 0, 0, 0, float("inf"), 0.0)


def traced(model: nn.Module) -> tuple[fx.GraphModule, int, set[str]]:
    """The joint graph, how many outputs are forward's, and the names of all that could be kept."""
    gm, forward_outputs = joint_graph(model, (torch.linspace(-1, 1, 32).view(4, 8),))
    PassManager((Shapes(), Flops(), BuildStorageProgram(forward_outputs)))(gm)
    program = read(STORAGE_PROGRAM, gm)
    return gm, forward_outputs, {program.storages[s].name for s in program.candidates}


def run(gm: fx.GraphModule, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return compat.pytree.tree_leaves(fx.Interpreter(gm).run(*given, enable_io_processing=False))


def inputs_of(gm: fx.GraphModule) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(node.meta["val"].shape) for node in gm.graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize("model", [Residual, Waves])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_whatever_is_kept_the_gradients_are_the_same(model: type[nn.Module], share: float):
    gm, forward_outputs, names = traced(model())
    given = inputs_of(gm)
    expected = run(gm, given)
    some = {name for k, name in enumerate(sorted(names)) if k < share * len(names)}
    rematerializing(kept(some))(gm)
    for ours, theirs in zip(run(gm, given), expected, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_backward_reads_of_forward_what_is_kept_and_what_is_given():
    gm, forward_outputs, names = traced(Residual())
    some = set(sorted(names)[:2])
    rematerializing(kept(some))(gm)
    forward, backward = compat.split_by_tags(gm, forward_outputs)
    saved = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    assert {name for name in saved if not name.startswith(("primals", "tangents"))} <= some
    assert len(forward.graph.output_node().args[0]) == forward_outputs + len(saved) - 1


def test_both_halves_together_are_the_whole():
    gm, forward_outputs, names = traced(Residual())
    given = inputs_of(gm)
    expected = run(gm, given)
    rematerializing(kept(set()))(gm)
    forward, backward = compat.split_by_tags(gm, forward_outputs)
    tangents = [x for node, x in zip(gm.graph.find_nodes(op="placeholder"), given) if "tangents" in node.name]
    made = run(forward, given[: len(given) - len(tangents)])
    results = [*made[:forward_outputs], *run(backward, [*made[forward_outputs:], *tangents])]
    for ours, theirs in zip(results, expected, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_it_is_computed_once_more_just_before_it_is_read():
    gm, forward_outputs, _ = traced(Residual())
    rematerializing(kept(set()))(gm)
    order = {node: k for k, node in enumerate(gm.graph.nodes)}
    again = [node for node in gm.graph.nodes if "_again" in node.name]
    first_of_backward = min(order[node] for node in gm.graph.nodes
                            if any("tangents" in x.name for x in node.all_input_nodes))
    assert again and all(order[node] > first_of_backward - len(again) - 1 for node in again)
    assert all(any("_again" in user.name or order[user] > order[node] for user in node.users) for node in again)


def test_what_was_decided_of_another_graph_is_refused():
    gm, _, names = traced(Residual())
    with pytest.raises(HpmlError, match="there is no elsewhere to save"):
        rematerializing(kept({*names, "elsewhere"}))(gm)


def test_random_numbers_are_never_drawn_again():
    gm, forward_outputs, names = traced(Residual(dropout=0.5))
    with pytest.raises(HpmlError, match="cannot be recomputed and is not saved"):
        rematerializing(kept(set()))(gm)

"""A joint graph and its offloaded values -> forward passes a one-byte handle to backward, with the same results."""
from __future__ import annotations

import gc
import os
import resource

import pytest
import torch
from torch import fx

from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.errors import HpmlError
from passes.presets import rematerializing
from passes.transforms.memory import offload_storage
from passes.transforms.memory.offload_ops import FETCH_START, OFFLOAD_START, OFFLOAD_WAIT
from tests.passes.transforms.memory.test_rematerialization import Residual, inputs_of, run, traced


def phase(node: fx.Node) -> str:
    return node.meta.get("partitioner_tag", "")


def split(offloaded: int, returned: bool = False) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Forward and backward where all is kept, and the first so many offloaded; how many outputs are forward's. returned: the
    first is one of them, as a value that a pipeline stage sends on."""
    gm, forward_outputs, names = traced(Residual())
    read = [node for node in gm.graph.nodes if node.name in names and "is_backward" in map(phase, node.users)]
    some = frozenset(node.name for node in read[:offloaded])
    if returned:
        output = gm.graph.output_node()
        output.args = ((read[0], *output.args[0]),)
        output.meta["desc"] = [output.meta["desc"][0], *output.meta["desc"]]  # torch's partitioner counts by these
        forward_outputs += 1
    rematerializing(CheckpointDecision(frozenset(names), 0, 0.0, 0, 0, 0, float("inf"), 0.0, some))(gm)
    return *compat.split_by_tags(gm, forward_outputs), forward_outputs


def both(forward, backward, forward_outputs, given) -> list[torch.Tensor]:
    tangents = given[len(forward.graph.find_nodes(op="placeholder")):]
    made = run(forward, given[: len(given) - len(tangents)])
    first, again = (run(backward, [*made[forward_outputs:], *tangents]) for _ in range(2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, again, strict=True)), "as with retain_graph=True"
    return [*made[:forward_outputs], *first]


@pytest.mark.parametrize("offloaded", [1, 3])
def test_whatever_is_offloaded_the_gradients_are_the_same(offloaded):
    gm, _, _ = traced(Residual())
    given = inputs_of(gm)
    expected = run(gm, given)
    forward, backward, outputs = split(offloaded)
    for ours, theirs in zip(both(forward, backward, outputs, given), expected, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_a_value_that_is_returned_can_be_offloaded():
    gm, _, _ = traced(Residual())
    given = inputs_of(gm)
    expected = run(gm, given)
    forward, backward, outputs = split(1, returned=True)
    results = both(forward, backward, outputs, given)
    assert results[0].numel() > 1
    for ours, theirs in zip(results[1:], expected, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_what_is_saved_of_it_is_one_byte():
    forward, _, outputs = split(2)
    saved = forward.graph.output_node().args[0][outputs:]
    handles = [node for node in saved if node.target is OFFLOAD_WAIT]
    assert len(handles) == 2 and all(node.meta["val"].numel() == 1 for node in handles)


def test_it_leaves_as_soon_as_it_is_there_and_comes_back_just_before_it_is_read():
    forward, backward, _ = split(2)
    for start in forward.graph.find_nodes(op="call_function", target=OFFLOAD_START):
        assert start.args[0] is start.prev
        (wait,) = start.users
        others = [user for user in start.args[0].users if user is not start and user is not wait]
        order = list(forward.graph.nodes)
        assert all(order.index(user) < order.index(wait) for user in others), "forward reads it no more"
    for start in backward.graph.find_nodes(op="call_function", target=FETCH_START):
        assert start.next.next in start.next.users


def test_a_name_that_is_not_there_is_refused():
    gm, _, names = traced(Residual())
    with pytest.raises(HpmlError, match="there is no nothing to offload"):
        rematerializing(CheckpointDecision(frozenset(names), 0, 0.0, 0, 0, 0, float("inf"), 0.0, frozenset({"nothing"})))(gm)


def away(value: torch.Tensor, folder: str = "") -> torch.Tensor:
    return OFFLOAD_START(value, value.stride(), folder)


def back(handle: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return FETCH_START(handle, like.shape, like.stride(), like.dtype, like.device)


@pytest.mark.parametrize("value", [
    torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4).t(), torch.arange(5) > 2, torch.tensor(3.5),
    torch.arange(6, dtype=torch.bfloat16)], ids=["rows", "columns", "bool", "scalar", "bfloat16"])
def test_every_dtype_and_stride_comes_back_as_it_was(value):
    fetched = back(away(value), value)
    assert torch.equal(fetched, value) and fetched.stride() == value.stride() and fetched.dtype == value.dtype


def test_a_compiler_may_have_given_it_other_strides():
    value = torch.arange(12.0).view(3, 4)
    handle = OFFLOAD_START(value.t().contiguous().t(), value.stride(), "")
    assert torch.equal(back(handle, value), value)


def maps() -> int:
    """Files of ours that are mapped, which have no name any more."""
    with open(f"/proc/{os.getpid()}/maps") as lines:
        return sum("hpml_" in line and "(deleted)" in line for line in lines)


def test_memory_elsewhere_is_free_when_nobody_holds_the_handle(tmp_path):
    before = maps()
    handle = away(torch.ones(1 << 16), str(tmp_path))
    kept = handle.detach()
    del handle
    gc.collect()
    assert maps() == before + 1 and not list(tmp_path.iterdir()), "the file has no name, and its space is taken"
    assert torch.equal(back(kept, torch.ones(1 << 16)), torch.ones(1 << 16))
    del kept
    gc.collect()
    assert maps() == before


def test_a_full_disk_and_a_limit_of_addresses_are_errors_that_say_so(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HpmlError, match="cannot be offloaded to a file: No space left on device") as caught:
        away(torch.ones(1 << 16), str(tmp_path))
    assert "offload_folder" in str(caught.value) and not list(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(offload_storage, "_take_space", lambda *_: None)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, limits[1]))
    try:
        with pytest.raises(HpmlError, match=f"{1 << 41} bytes .* exceed its limit of {1 << 40} bytes") as caught:
            offload_storage.reserve(1 << 41, torch.device("cpu"), str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "ulimit -v" in caught.value.where and "control group" in caught.value.next_step
    with pytest.raises(HpmlError, match="cannot create a file"):
        away(torch.ones(4), str(tmp_path / "none"))


def test_a_handle_that_was_copied_is_refused():
    value = torch.ones(64)
    with pytest.raises(HpmlError, match="copied without the memory behind it"):
        back(away(value).clone(), value)

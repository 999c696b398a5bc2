"""Saved in the middle of a pass -> resumed on as many, half or twice the ranks: the losses of an uninterrupted run."""
from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from hpml_compiler.checkpoints.checkpoint_folder import name_of
from tests.hpml_compiler.checkpoints.toy import BATCHES, Blocks, Run

STEPS, SAVED = 16, 10
assert SAVED % BATCHES, "in the middle of a pass"
MODES = {
    "tp": {2: {"mesh": {"tp": 2}}, 1: None},
    "pp": {2: {"mesh": {"pp": 2}, "microbatches": 2}, 4: {"mesh": {"tp": 2, "pp": 2}}},
}
MORE = {
    "dp": {2: {"mesh": {"dp": 2}}, 1: None},
    "zero3": {2: {"mesh": {"dp": 2}, "memory_budget": "450KB"}, 4: {"mesh": {"dp": 4}, "memory_budget": "450KB"}},
    "budget": {2: {"mesh": {"tp": 2}, "memory_budget": "450KB"}, 1: {"memory_budget": "700KB"}},
}
REST = {
    "tp": {4: {"mesh": {"tp": 4}}}, "pp": {1: None}, "dp": {4: {"mesh": {"dp": 4}}}, "zero3": {1: None},
    "budget": {4: {"mesh": {"dp": 2, "tp": 2}, "memory_budget": "450KB"}},
}


def with_rest(modes):
    """HPML_TEST_EVERYTHING=1 resumes each on as many ranks, half and twice as many."""
    everything = os.environ.get("HPML_TEST_EVERYTHING") == "1"
    return {mode: {**each, **REST[mode]} for mode, each in modes.items()} if everything else modes


def run_twice(rank, folder, modes):
    """An uninterrupted run, and one that is resumed at its checkpoint, in each mode."""
    losses = {}
    for mode, options in ((mode, each[2]) for mode, each in modes.items()):
        run = Run(f"{folder}/{mode}", options, every=SAVED // 2, keep=None)
        whole = run.train(STEPS)
        run.checkpointer.close()
        assert run.start == STEPS and (mode != "zero3" or any(p.placements[0].is_shard() for p in run.model.parameters()))
        if rank == 0:
            shutil.rmtree(f"{folder}/{mode}/{name_of(STEPS - 1)}")
        dist.barrier()
        again = Run(f"{folder}/{mode}", options)
        assert again.start == SAVED and again.loader.passes == 1
        assert again.train(STEPS) == whole[SAVED:], mode
        losses[mode] = whole
    return losses


def run_others(rank, folder, modes):
    found = {}
    for mode, each in modes.items():
        if dist.get_world_size() not in each:
            continue
        run = Run(f"{folder}/{mode}", each[dist.get_world_size()])
        assert run.start == SAVED
        found[mode] = run.train(STEPS)
    return found


@pytest.mark.parametrize("modes", [
    with_rest(MODES), pytest.param(with_rest(MORE), marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_resumed_on_any_number_of_ranks(launch, tmp_path, modes):
    alone = Run(str(tmp_path / "alone")).train(STEPS)
    whole = launch(run_twice, args=(str(tmp_path), modes), timeout_s=300)[0]
    for world in (1, 4):
        for mode, losses in launch(run_others, world, (str(tmp_path), modes), timeout_s=300)[0].items():
            torch.testing.assert_close(losses, whole[mode][SAVED:], rtol=1e-9, atol=1e-9)
    for losses in whole.values():
        torch.testing.assert_close(losses, alone, rtol=1e-9, atol=1e-9)
    for mode in whole:  # with torch alone: Hugging Face's layout
        model = Blocks().double()
        state = {name: torch.full_like(value, torch.nan) for name, value in model.state_dict().items()}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / mode / name_of(SAVED) / "model")))
        assert model.load_state_dict(state) and all(value.isfinite().all() for value in state.values())


def run_after_the_first_step(rank, folder):
    """Resume a model that is sharded already, with and without optimizer state."""
    whole = Run(folder, MODES["tp"][2], every=3, keep=None)
    expected = whole.train(9)
    whole.checkpointer.close()
    expected = {k: expected[k] for k in (6, 7, 8)}
    if rank == 0:
        shutil.rmtree(f"{folder}/{name_of(9)}")
    dist.barrier()
    assert whole.checkpointer.resume() == 6
    whole.start = 6
    other = Run(f"{folder}-other", MODES["tp"][2])
    other.train(2)
    other.checkpointer._folder = whole.checkpointer._folder
    other.optimizer.state.clear()
    other.start = other.checkpointer.resume()
    assert other.train(9) == list(expected.values())
    assert any(type(value).__name__ == "PlacedTensor" for state in other.optimizer.state.values() for value in state.values())


def test_resume_of_a_sharded_model_reads_into_its_shards(launch, tmp_path):
    launch(run_after_the_first_step, args=(str(tmp_path),))


@pytest.mark.parametrize("background", [True, False])
def test_what_changes_after_the_save_is_not_in_it(tmp_path, background):
    run = Run(str(tmp_path), every=2, background=background)
    run.train(2)
    saved = {name: value.clone() for name, value in run.model.state_dict().items()}
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.checkpointer.close()
    for name, value in Run(str(tmp_path)).model.state_dict().items():
        assert torch.equal(value, saved[name])


def test_old_checkpoints_are_removed(tmp_path):
    run = Run(str(tmp_path), every=1, keep=2)
    run.train(5)
    run.checkpointer.close()
    assert sorted(os.listdir(tmp_path)) == [name_of(4), name_of(5)]


def test_on_another_file_system(tmp_path):
    folder = f"memory://{tmp_path.name}"
    run = Run(folder, every=2, keep=1)
    run.train(6)
    run.checkpointer.save(5, wait=True)  # in place of the one of this step
    again = Run(folder)
    assert again.start == 6 and again.train(8) == Run(f"{folder}-other").train(8)[6:]

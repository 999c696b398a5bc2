"""A joint graph before -> its runs and storages after."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from passes.analyses.flops import Flops
from passes.analyses.shapes import Shapes
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM
from passes.manager import PassManager
from passes.simulation.memory.memory_trace import simulate_memory
from passes.simulation.memory.storage_program import StorageProgram
from tests.passes.traced import joint_graph


def program_of(model: nn.Module, *batch: torch.Tensor, fuses: bool = True) -> StorageProgram:
    gm, forward_outputs = joint_graph(model, batch)
    PassManager((Shapes(), Flops(), BuildStorageProgram(forward_outputs, None, fuses)))(gm)
    return read(STORAGE_PROGRAM, gm)


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False), dropout

    def forward(self, x):
        return self.down(F.dropout(torch.tanh(self.up(x)).view(-1, 32), self.dropout)).sum()


X = torch.ones(4, 8)


def test_views_are_no_runs_and_share_a_storage():
    program = program_of(MLP(), X)
    assert not {"view", "t", "permute", "expand"} & {run.name.rstrip("0123456789").rstrip("_") for run in program.runs}
    product = next(run for run in program.runs if run.backward)
    tangents, other = sorted(product.reads, key=lambda s: not program.storages[s].input_phase)
    assert program.storages[tangents].input_phase == "backward"
    assert program.is_forward(other) and program.storages[other].nbytes == 4 * 32 * 4, "through views of it"


def test_what_is_given_and_what_is_handed_out():
    program = program_of(MLP(), X)
    assert {storage.input_phase for storage in program.storages if storage.maker is None} == {"forward", "backward"}
    assert len(program.returned) == 1 and len(program.gradients) == 2
    assert all(program.runs[program.maker(s)].backward for s in program.gradients)


def test_backward_is_what_follows_from_the_tangents():
    program = program_of(MLP(), X)
    first = next(k for k, run in enumerate(program.runs) if run.backward)
    assert {run.name.split("_")[0] for run in program.runs[:first]} >= {"mm", "tanh", "sum"}


def test_what_follows_from_random_numbers_is_not_made_without_keeping_some():
    assert not simulate_memory(program_of(MLP(), X), ()).saved
    program = program_of(MLP(dropout=0.5), X)
    kept = simulate_memory(program, ()).saved
    assert kept and not any(program.repeatable(s) for s in kept)


def test_attention_without_dropout_can_run_again():
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x).sum()

    program = program_of(attend, torch.ones(1, 2, 8, 4, requires_grad=True))
    assert all(run.repeatable for run in program.runs if "attention" in run.name)


def test_without_fusion_every_result_takes_memory():
    assert any(run.inlined for run in program_of(MLP(), X).runs)
    assert not any(run.inlined or run.fusing for run in program_of(MLP(), X, fuses=False).runs)


def test_what_is_computed_from_an_input_that_is_changed_afterwards_cannot_run_again():
    def reading_first_input(written: set[int]) -> list[bool]:
        gm, forward_outputs = joint_graph(MLP(), (X,))
        PassManager((Shapes(), Flops(), BuildStorageProgram(forward_outputs, written=frozenset(written))))(gm)
        program = read(STORAGE_PROGRAM, gm)
        first = next(s for s, storage in enumerate(program.storages) if storage.name == "primals_1")
        return [program.runs[k].repeatable for k in program.readers[first]]

    assert all(reading_first_input(set())) and not any(reading_first_input({0}))


def test_what_the_script_says_by_checkpointing_is_said_of_storages():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(MLP() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(lambda t, block=block: block.down(torch.tanh(block.up(t))).view(-1, 8), x, use_reentrant=False)
            return x.sum()

    program = program_of(Checkpointed(), X)
    said = {storage.name: storage.pinned for s, storage in enumerate(program.storages) if s in program.candidates}
    assert set(said.values()) == {"keep", "again"}
    (kept,) = program.bound_to_keep
    assert program.storages[kept].name.startswith("mm"), "of which a view is what the first block hands to the second"


WEIGHT, COLUMNS = 8 * 3 * 9 * 4, 2 * (3 * 9) * (6 * 6) * 8


@pytest.mark.parametrize(("dtype", "size", "expected"), [
    (torch.float32, 3, (WEIGHT, 2 * WEIGHT)), (torch.float64, 3, (COLUMNS, COLUMNS)), (torch.float64, 1, (0, 0))])
def test_a_convolution_takes_copies_of_its_weight_or_a_matrix_of_what_its_kernels_see_while_it_runs(dtype, size, expected):
    x = torch.ones(2, 3, 8, 8, requires_grad=True, dtype=dtype)
    program = program_of(nn.Conv2d(3, 8, size, bias=False, dtype=dtype), x)
    scratch = {run.backward: run.scratch_bytes for run in program.runs if "convolution" in run.name}
    assert scratch == {False: expected[0], True: expected[1]}


def test_what_is_looked_up_takes_no_memory_and_what_is_added_up_in_place_does():
    class Up(nn.Module):
        def forward(self, x):
            return torch.cat([F.interpolate(x, scale_factor=2.0), torch.ones(2, 1, 8, 8)], 1).sin().sum()

    program = program_of(Up(), torch.ones(2, 3, 4, 4, requires_grad=True))
    looked_up = next(run for run in program.runs if "unsafe_index" in run.name and not run.backward)
    added = next(run for run in program.runs if "index_put" in run.name)
    assert looked_up.inlined and added.fusing and not added.inlined
    assert not any(storage.name == looked_up.name for life in simulate_memory(program, ()).forward.lives
                   for storage in [program.storages[life.storage]])

"""A pipeline on two ranks, from the joint graph of a model: the outputs and gradients of one device."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpml_compiler.compile.stages import lower_stage
from hpml_compiler.runtime.stages import Messages, Run
from passes.annotations import read
from passes.errors import HpmlError
from passes.graph.copied import copied
from passes.graph.nodes import returned_nodes
from passes.graph.stages import STAGES
from passes.machine.cluster import Cluster
from passes.presets import annotate, staging
from passes.schedule.actions import schedule
from passes.transform.split_stages import parts_of_gradients, split_stages
from tests.passes.traced import trace_joint


class Tied(nn.Module):
    """A table that is looked up at first and multiplied by in the end, and blocks that all read the first result."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)])

    def forward(self, tokens, labels):
        first = x = self.table(tokens)
        for block in self.blocks:
            x = block(x) + first
        logits = x @ self.table.weight.t()
        return F.cross_entropy(logits, labels), logits


def run_pipeline(rank, name, microbatches, virtual, compiler, broken=False):
    """Differences to the whole graph of what this rank returns, over all microbatches; and how many values were compared."""
    torch.manual_seed(0)
    joint = trace_joint(Tied().double(), torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.long))
    values = {}
    for node in joint.gm.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        for k in range(microbatches):
            values[k, node.name] = torch.randn(fake.shape, dtype=fake.dtype) if fake.is_floating_point() else \
                torch.randint(0, 16, fake.shape)
            if not node.name.startswith("tangents") and fake.is_floating_point():
                values[k, node.name] = values[0, node.name]  # parameters
    gm = copied(joint.gm)
    annotate(gm, joint.inputs, joint.forward_outputs)
    staging(2 * virtual, Cluster.local(1, "cpu").device)(gm)
    table = schedule(name, 2, microbatches, virtual)
    calls = {graph.index: lower_stage(graph, compiler) for graph in split_stages(gm, joint.inputs)
             if table.ranks[graph.index] == rank}

    def given(microbatch, name):
        if broken and rank == 1 and microbatch == 1:
            raise ValueError("broken on purpose")
        return values[microbatch, name]

    run = Run(table, rank, calls, Messages((0, 1), torch.device("cpu")), given)
    run.run()
    gradients = run.add_up(parts_of_gradients(gm))
    placeholders = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    expected = [torch.fx.Interpreter(gm).run(*(values[k, name] for name in placeholders)) for k in range(microbatches)]
    returned = returned_nodes(gm)
    worst = max([float((x - expected[k][place]).abs().max()) for (k, place), x in run.outputs.items()], default=0.0)
    for name, x in gradients.items():
        place = joint.forward_outputs + placeholders.index(name)
        assert returned[place] is not None
        whole = sum(each[place] for each in expected)
        worst = max(worst, float((x - whole).abs().max()))
    assert not any(run.known.values()) and not run.arriving
    return worst, len(run.outputs), sorted(gradients), read(STAGES, gm).parameters


@pytest.mark.parametrize(("name", "microbatches", "virtual", "compiler"), [
    ("gpipe", 1, 1, "eager"), ("1f1b", 3, 1, "inductor"), ("interleaved", 2, 2, "eager"),
])
def test_two_ranks_give_what_one_device_gives(launch, name, microbatches, virtual, compiler):
    first, last = launch(run_pipeline, 2, (name, microbatches, virtual, compiler))
    assert first[0] < 1e-12 and last[0] < 1e-12
    if microbatches == 1:
        assert first[0] == last[0] == 0.0
    assert (first[1], last[1]) == (0, 2 * microbatches)
    assert len(set(first[2]) & set(last[2])) == 1  # the table's, whole on both
    assert set(first[2]) | set(last[2]) == set(first[3])


def run_broken(rank):
    try:
        run_pipeline(rank, "1f1b", 2, 1, "eager", broken=True)
    except HpmlError as error:
        return str(error)


def test_a_stage_that_raises_is_named_with_its_microbatch(launch):
    _, said = launch(run_broken, 2, check=False, timeout_s=60)
    assert "forward of stage 1, microbatch 1 failed: ValueError: broken on purpose" in said and "rank 1" in said

"""Traced models -> the stage of every call, and values that cross."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from passes.annotations import read
from passes.errors import BadInput
from passes.graph.module_blocks import is_backward
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.hardware.cluster import Cluster
from passes.pipeline.stage_assignment import STAGES, StageAssignment
from passes.presets import finding_stages
from tests.passes.pipeline.test_find_blocks import EncoderDecoder, UNet
from tests.passes.traced import annotated_joint, mlp, transformer


def staged(count: int, model: nn.Module, *batch: torch.Tensor) -> tuple[torch.fx.GraphModule, StageAssignment]:
    gm = annotated_joint(model, *batch).gm
    finding_stages(count, Cluster.local(1, "cpu").device)(gm)
    stages = read(STAGES, gm)
    check(gm, stages)
    return gm, stages


def check(gm: torch.fx.GraphModule, stages: StageAssignment) -> None:
    """Every call has a stage; forward goes on, backward comes back; and what is said to be sent is what is read elsewhere."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert {node.name for node in calls} == set(stages.of) and set(stages.of.values()) == set(range(stages.count))
    crossed = set()
    for node in calls:
        for user in node.users:
            if user.op == "output" or stages.of[user.name] == stages.of[node.name] or {node.name, user.name} & (
                    stages.copied | stages.summed):
                continue
            later = stages.of[user.name] > stages.of[node.name]
            assert not is_backward(node) if later else is_backward(user), (node, user)
            crossed.add((node.name, FORWARD if later else BACKWARD, stages.of[user.name]))
    assert crossed == {(each.value, each.phase, reader) for each in stages.sent for reader in each.readers}


def test_layers_are_shared_out_and_one_value_goes_each_way():
    model, batch = transformer(32, 16, 2, 4, rows=2, length=8)
    _, stages = staged(2, model, *batch)
    layers = [[name for name in blocks if name.startswith("blocks.")] for blocks in stages.blocks]
    assert layers == [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]]
    for phase in (FORWARD, BACKWARD):
        assert [each.bytes for each in stages.over(0, phase)] == [2 * 8 * 16 * 4]
    assert max(stages.time_us) < 1.3 * min(stages.time_us)


def test_the_head_counts():
    """It takes longer than all layers: they are together in one stage, and it is in another."""
    model, batch = transformer(8192, 16, 2, 4, rows=2, length=256)
    _, stages = staged(2, model, *batch)
    assert "blocks.3" in stages.blocks[0] and "head" in stages.blocks[1]


def test_a_skip_goes_through_the_stages_between_and_its_gradient_is_added_up_there():
    _, stages = staged(4, UNet(), torch.randn(4, 8))
    (skip,) = [each for each in stages.sent if each.phase == FORWARD and len(each.readers) > 1]
    assert skip.readers == (1, 2) and skip in stages.over(0, FORWARD) and skip in stages.over(1, FORWARD)
    assert [len(stages.over(border, FORWARD)) for border in range(3)] == [1, 2, 1]
    assert [len(stages.over(border, BACKWARD)) for border in range(3)] == [1, 2, 1]


def test_gradients_of_what_several_stages_read_are_added_up_on_their_way_back():
    """Both blocks of the decoder read the encoder's result: over each border goes one gradient of it, however many read it."""
    tokens = torch.zeros(4, dtype=torch.long)
    gm, stages = staged(4, EncoderDecoder(), tokens, tokens + 1)
    for border in range(3):
        assert len(stages.over(border, BACKWARD)) == len(stages.over(border, FORWARD)) <= 2
    (table,) = [name for name, readers in stages.parameters.items() if len(readers) > 1]
    (whole,) = stages.sums
    assert [stages.of[part] for part in stages.sums[whole]] == sorted(stages.parameters[table], reverse=True)
    assert stages.parameters[table][0] == 0 == stages.of[whole]


def test_too_many_stages_are_refused_with_how_many_there_may_be():
    with pytest.raises(BadInput, match="take at most 3 stages"):
        staged(9, mlp(8, 16, 2), torch.randn(4, 8))

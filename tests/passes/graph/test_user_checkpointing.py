"""Calls as torch marks them in checkpointed regions -> the script's policy for their results."""
from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from passes.graph.user_checkpointing import CHECKPOINTED, POLICY, REGION, copy_checkpoint_marks, user_policy_of

AGAIN, MUST = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE
KEEP, MAY_KEEP = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE


def calls(*marks: tuple[CheckpointPolicy | None, int | None]) -> list[Node]:
    """A chain of calls, each with a policy and a region."""
    graph = Graph()
    node, made = graph.placeholder("x"), []
    for policy, region in marks:
        node = graph.call_function(torch.sin, (node,))
        node.meta.update({key: value for key, value in ((POLICY, policy), (REGION, region)) if value is not None})
        made.append(node)
    return made


@pytest.mark.parametrize(("policy", "said"), [
    (AGAIN, "again"), (MUST, "again"), (KEEP, "keep"), (MAY_KEEP, ""), (None, "")])
def test_a_policy_says_so(policy, said):
    assert user_policy_of(calls((policy, 0))[0]) == said


def test_what_one_region_hands_to_a_later_one_is_kept():
    first, last, other, after = calls((AGAIN, 0), (AGAIN, 0), (AGAIN, 1), (None, None))
    assert [user_policy_of(each) for each in (first, last, other, after)] == ["again", "keep", "again", ""]


def test_marks_are_handed_on_as_they_are_or_taken_away():
    marked, bare = calls((KEEP, 3), (None, None))
    copy_checkpoint_marks(marked, bare)
    assert {key: bare.meta.get(key) for key in CHECKPOINTED[:2]} == {POLICY: KEEP, REGION: 3}
    copy_checkpoint_marks(calls((None, None))[0], bare)
    assert not set(CHECKPOINTED) & set(bare.meta)

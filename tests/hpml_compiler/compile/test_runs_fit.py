"""Models that fit only after a further search, or not at all -> the same plan or refusal of a run and of `hpml plan`."""
from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

import hpml_compiler
from passes.errors import HpmlError
from passes.hardware.cluster import Cluster
from passes.solver.work_limit import WorkLimit
from tests.helpers.alone import rank_0_of
from tests.hpml_compiler.planner.search.test_fitting_search import Blocks, tokens

CASES = {  # model, batch, ranks, options, a memory that is enough (for some after a further search), and one that is not
    "microbatches": (Blocks, tokens, 2, {"mesh": {"dp": 2}, "microbatches": 4}, (850_000, 570_000)),
    "split stages": (Blocks, tokens, 4, {"mesh": {"pp": 2, "dp": 2}, "microbatches": 4}, (700_000, 400_000)),
    "stages": (Blocks, tokens, 2, {"mesh": {"pp": 2}, "microbatches": 4}, (900_000, 300_000)),
}
SEARCHED = "microbatches", "split stages"
TINY_S = 1e-3
"""Work of the problem of when to gather, which has a limit of its own."""


def run(case: str, cluster: str) -> str:
    """The peak that was agreed on, or the refusal. Where it was searched for, one allowance of work was spent."""
    make, batch, world, options, _ = CASES[case]
    limits: list[WorkLimit] = []
    init = WorkLimit.__init__

    def counted(self, seconds, parent=None, *others):
        init(self, seconds, parent, *others)
        if parent is None and math.isfinite(seconds):
            limits.append(self)

    with rank_0_of(world), mock.patch.object(WorkLimit, "__init__", counted):
        call = torch.compile(make(), backend="hpml", options={
            **options, "compiler": "eager", "monitor": False, "cluster": cluster})
        try:
            call(*batch())
        except Exception as error:
            return refusal(error)
        assert case not in SEARCHED or sum(limit.left_s < limit.seconds - TINY_S for limit in limits) == 1
        return f"fits: {hpml_compiler.last_plan().peak.parts}"


def plan(case: str, cluster: str) -> str:
    make, batch, _, options, _ = CASES[case]
    try:
        found = hpml_compiler.plan(make(), batch(), cluster=cluster, trace_all_layers=True, compiler="eager", **options)
    except HpmlError as error:
        return refusal(error)
    return f"fits: {found.peak.parts}"


def refusal(error: BaseException) -> str:
    """Without the name of the graph, and what a plan says of other configurations, which a run does not search."""
    while not isinstance(error, HpmlError):
        assert error.__cause__ is not None or error.__context__ is not None, error
        error = error.__cause__ or error.__context__
    return re.sub(r"; (none of \d+ configurations|parameters, gradients and optimizer state take) .*$", "", error.what)


@pytest.mark.parametrize("case", CASES)
def test_a_run_decides_as_a_plan_does(case, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hpml")
    world, memories = CASES[case][2], CASES[case][-1]
    made = Cluster.parse(f"1x{world}:a100-80g")
    found = []
    for memory_bytes in memories:
        file = tmp_path / f"{memory_bytes}.json"
        Cluster((replace(made.group, device=replace(made.device, memory_bytes=memory_bytes)),)).save(file)
        found.append(plan(case, str(file)))
        searched = sum("searching for placements" in message for message in caplog.messages)
        assert run(case, str(file)) == found[-1]
        own = sum("searching for placements" in message for message in caplog.messages) - searched
        assert own <= searched and bool(own) == bool(searched)  # a plan goes on to other configurations
        assert searched or case not in SEARCHED
        caplog.clear()
    assert found[0].startswith("fits") and "more than its" in found[-1]


def test_a_run_with_more_stages_than_its_graph_has_parts_says_so(caplog):
    """`hpml plan` refuses them; in a run, other graphs of the step may have enough parts."""
    with rank_0_of(4):
        head = torch.compile(torch.nn.Linear(32, 512), backend="hpml", options={"mesh": {"pp": 4}, "compiler": "eager"})
        head(torch.zeros(64, 32)).sum().backward()
    assert "is not pipelined; every stage runs it in full: the graph has" in caplog.text

"""Models of many families on meshes of several kinds -> plans whose figures agree with each other."""
from __future__ import annotations

import pytest

import hpml_compiler
from tests.hpml_compiler.planner.figures import check_figures
from tests.passes.op_rules.families.zoo import MODELS

CASES = {
    "gpt2": ("1x4:a100-80g", {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2}),
    "bert": ("1x4:a100-80g", {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2}),  # less in memory at once than saved and resident
    "llama": ("1x4:h100-80g", {"mesh": {"dp": 2, "tp": 2}}),
    "t5": ("1x2:cpu", {"mesh": {"dp": 2}, "zero": 3}),
    "mixtral": ("1x2:a100-80g", {}),
    "convnet": ("1x4:a100-80g", {"mesh": {"tp": 4}}),
    "dlrm": ("1x2:cpu", {"objective": "energy"}),
}


@pytest.mark.parametrize("name", CASES)
def test_figures_of_a_plan_agree(name):
    cluster, options = CASES[name]
    check_figures(hpml_compiler.plan(*MODELS[name](), cluster=cluster, **options))

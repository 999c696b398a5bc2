"""Plans of real models, each planned once in a test process."""
from __future__ import annotations

import functools

import hpml_compiler
from hpml_compiler.plan_api.model_plan import Plan
from tests.passes.op_rules.families.zoo import MODELS

CASES = {
    "gpt2": ("2x2:a100-80g", {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2}),
    "bert": ("1x4:a100-80g", {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2}),  # less in memory at once than saved and resident
    "llama": ("2x2:h100-80g", {"mesh": {"dp": 2, "tp": 2}}),
    "t5": ("1x2:cpu", {"mesh": {"dp": 2}, "zero": 3}),
    "mixtral": ("1x2:a100-80g", {}),
    "convnet": ("1x4:a100-80g", {"mesh": {"tp": 4}}),
    "vit": ("1x1:a100-80g", {"memory_budget": "1400KiB"}),
    "dlrm": ("1x2:cpu", {"objective": "energy"}),
}


@functools.cache
def zoo_plan(name: str) -> Plan:
    cluster, options = CASES[name]
    made = hpml_compiler.plan(*MODELS[name](), cluster=cluster, **options)
    assert isinstance(made, Plan)
    return made

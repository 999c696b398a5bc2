"""Pins that do not fit the devices, the batch or each other -> an error that says what, where, and what to do next."""
from __future__ import annotations

import pytest
import torch

import hpml_compiler
from passes.errors import BadInput, HpmlError, Infeasible
from tests.passes.traced import mlp

ROWS = torch.randn(8, 32)


@pytest.mark.parametrize(("cluster", "options", "said"), [
    ("1x8:cpu", {"mesh": {"pp": 3}}, "multiplies to 3"),
    ("2x6:cpu", {"mesh": {"pp": 4, "dp": 3}}, "4 stages do not divide"),
    ("1x4:cpu", {"mesh": {"pp": 2, "tp": 3}}, "3"),
    ("1x2:cpu", {"mesh": {"dp": 2, "tp": 2}}, "2"),
    ("1x2:cpu", {"mesh": {"pp": 0}}, "pp"),
    ("1x2:cpu", {"schedule": "1f1b"}, "pp"),
    ("1x2:cpu", {"virtual_stages": 2}, "pp"),
    ("1x2:cpu", {"schedule": "bitonic"}, "schedule"),
    ("1x2:cpu", {"mesh": {"pp": 2}, "schedule": "interleaved", "virtual_stages": 2, "microbatches": 1}, "multiple"),
    ("1x2:cpu", {"mesh": {"pp": 2}, "schedule": "1f1b", "virtual_stages": 2, "microbatches": 2}, "2 stages a rank"),
    ("1x2:cpu", {"mesh": {"pp": 2}, "schedule": "zbv", "microbatches": 4}, "two stages a rank"),
    ("1x2:cpu", {"microbatches": 0}, "microbatches"),
    ("1x2:cpu", {"microbatches": "two"}, "microbatches"),
    ("1x2:cpu", {"solver": "none"}, "solver"),
    ("1x2:cpu", {"recompute": "some"}, "recompute"),
    ("1x2:cpu", {"memory_budget": "1KB"}, "needs"),
    ("1x2:cpu", {"mesh": {"dp": 2}, "memory_budget": "1KB"}, "needs"),
    ("1x2:cpu", {"mesh": {"dp": 2}, "memory_budget": "1KB", "microbatches": 2}, "needs"),
])
def test_the_error_names_what_is_wrong_and_a_next_step(cluster, options, said):
    with pytest.raises(HpmlError) as caught:
        hpml_compiler.plan(mlp(32, 32, layers=4), (ROWS,), cluster=cluster, **options)
    error = caught.value
    assert said in f"{error.what} {error.where} {error.next_step}" and error.where and error.next_step
    assert isinstance(error, Infeasible if "memory_budget" in options else BadInput)
    assert error.exit_code == (3 if "memory_budget" in options else 2)

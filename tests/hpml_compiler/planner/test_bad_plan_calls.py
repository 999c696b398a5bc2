"""`hpml_compiler.plan` called wrongly: the same words as on the command line, which has a table of its own."""
from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import hpml_compiler
from passes.errors import BadInput

MODEL, BATCH = nn.Linear(4, 2), (torch.zeros(3, 4),)


@pytest.mark.parametrize(("arguments", "options", "said"), [
    ((None, BATCH), {}, "a NoneType, not a torch.nn.Module"),
    ((nn.Linear, BATCH), {}, "the class Linear"),
    ((lambda x: x, BATCH), {}, "a function"),
    ((MODEL, 3), {}, "not int"),
    ((MODEL, None), {}, "not NoneType"),
    ((MODEL, (numpy.zeros((3, 4)),)), {}, "torch.float64"),
    ((MODEL, (torch.zeros(3, 4, dtype=torch.long),)), {}, "torch.int64"),
    ((MODEL, (torch.zeros(0, 4),)), {}, "no rows"),
    ((MODEL, {2: BATCH[0]}), {}, "which is no name"),
    ((MODEL, BATCH), {"cluster": 8}, "the cluster is a int: 8"),
    ((MODEL, BATCH), {"cluster": Path("no.json")}, "No such file"),
    ((MODEL, BATCH), {"cluster": ""}, "cluster"),
    ((MODEL, BATCH), {"mesh": [2, 2]}, "mesh"),
    ((MODEL, BATCH), {"meshh": {"dp": 2}}, "did you mean 'mesh'"),
    ((MODEL, BATCH), {"memory_budget": math.nan}, "number of bytes"),
    ((MODEL, BATCH), {"memory_budget": 10**400}, "exabyte"),
    ((MODEL, BATCH), {"time_limit": 10**400}, "time_limit"),
    ((MODEL, BATCH), {"power_cap": 10**400}, "watts"),
    ((MODEL, BATCH), {"plan": 3}, "plan"),
    ((MODEL, BATCH), {"plan": "a\0b"}, "cannot read the plan"),
])
def test_bad_call(arguments, options, said):
    with pytest.raises(BadInput) as caught:
        hpml_compiler.plan(*arguments, **options)
    assert said in caught.value.what and caught.value.where and caught.value.next_step

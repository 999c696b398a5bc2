"""Scripts before -> what the backend says of them."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
torch._dynamo.config.allow_rnn = {allow}
model = torch.compile(torch.nn.GRU(4, 4), backend="hpml", options={{"compiler": "eager"}})
model(torch.zeros(2, 3, 4))[0].sum().backward()
"""


def said(allow: bool, ranks: int) -> str:
    script = SCRIPT.format(allow=allow)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    if ranks == 1 or not allow:  # nobody communicates: one rank says it for both
        environment |= {"WORLD_SIZE": str(ranks), "RANK": "0"}
        command = [sys.executable, "-c", script]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                   "--no-python", sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("allow", "ranks", "warned"), [(False, 2, True), (False, 1, False), (True, 2, False)])
def test_a_model_that_never_came_to_the_backend_is_warned_of(allow, ranks, warned):
    assert ("no graph came to the backend" in said(allow, ranks)) == warned


NEVER_CALLED = """
import torch
model = torch.compile(torch.nn.Linear(4, 4), backend="hpml")
"""
RAISED = """
import torch
torch._dynamo.config.allow_rnn = False
model = torch.compile(torch.nn.GRU(4, 4), backend="hpml")
model(torch.zeros(2, 3, 5))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("script", "ends_with"), [(NEVER_CALLED, 0), (RAISED, 1)])
def test_a_model_that_was_not_called_or_failed_is_not_warned_of(script, ends_with):
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == ends_with, done.stderr[-3000:]
    assert "no graph came to the backend" not in done.stderr


def test_public_names_are_listed():
    import hpml_compiler

    assert set(hpml_compiler.__all__) <= set(dir(hpml_compiler))
    assert all(getattr(hpml_compiler, name) is not None for name in hpml_compiler.__all__)

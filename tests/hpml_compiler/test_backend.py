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

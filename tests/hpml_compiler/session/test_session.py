"""`hpml_compiler.reset()` between models before -> each starts afresh, and the ones from before go on."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import hpml_compiler
from hpml_compiler.session import session
from tests.hpml_compiler.compile.inputs.test_graph_inputs import Net, in_turn


def run_sweep(rank):
    sweep = [(Net(32), {"tp": 2}), (Net(32, 1), {"dp": 2}), (Net(64, 2), {"tp": 2})]
    references, calls = [Net(32), Net(32, 1), Net(64, 2)], []
    for (model, mesh), reference in zip(sweep, references, strict=True):
        options: Any = {"compiler": "eager", "mesh": mesh}
        calls.append(torch.compile(model, backend="hpml", options=options))
        assert not session.current().graphs and session.current().monitor is None
        seen = in_turn(calls[-1:], [model])
        torch.testing.assert_close(seen, in_turn([reference], [reference]))
        assert session.current().mesh == mesh == hpml_compiler.last_plan().mesh
        hpml_compiler.reset()
    models = [model for model, _ in sweep]
    torch.testing.assert_close(in_turn(calls, models), in_turn(references, references))
    for model, mesh in sweep:
        weight: Any = model.a.weight
        assert weight.device_mesh.mesh_dim_names == tuple(mesh)
    # Process groups, each of which has threads, are made once for a mesh and not once for a model.
    first, _, third = (model.a.weight.device_mesh.get_group() for model in models)
    assert first is third


@pytest.mark.timeout(160)
def test_a_sweep_over_models(launch):
    launch(run_sweep, world_size=2, timeout_s=150)

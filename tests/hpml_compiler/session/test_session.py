"""`hpml_compiler.reset()` between models -> each starts afresh, earlier ones go on; `Session.close()` -> nothing is left."""
from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import hpml_compiler
from hpml_compiler.runtime.outputs import recorded_call
from hpml_compiler.runtime.outputs.loss_memory import LossMemories
from hpml_compiler.session import session
from passes.session_state import state, state_of
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
    run_losses_outside()


def run_losses_outside():
    """A reset -> nothing is known of earlier models' losses, and no graphs count that were compiled for them."""
    recorded_call.MOST_GRAPHS = 1
    for _ in range(2):
        hpml_compiler.reset()
        model = torch.nn.Linear(16, 2048)
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}})
        for _ in range(3):
            F.cross_entropy(call(torch.ones(64, 16)), torch.arange(64)).backward()
            model.zero_grad()
        (memory,) = state_of(LossMemories)
        assert memory.described() == "graph_0: the script's loss (cross_entropy) is part of the step"


@pytest.mark.timeout(160)
def test_a_sweep_over_models(launch):
    launch(run_sweep, world_size=2, timeout_s=150)


def own_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("hpml-")]


def run_closed_sessions(rank: int, ranks: int) -> None:
    os.environ["HPML_CACHE"] = "0"
    options: Any = {"compiler": "eager", "microbatches": 2} if ranks == 1 else {"compiler": "eager", "mesh": {"tp": ranks}}
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    given, outcomes = [len(each) for each in hooks], []
    for _ in range(2):
        model, opened = Net(32), session.current()
        seen = in_turn([torch.compile(model, backend="hpml", options=options)], [model])
        plan = json.loads(hpml_compiler.last_plan().to_json())
        for graph in plan["graphs"]:
            del graph["seconds"], graph["solver"]  # which has seconds, too
        outcomes.append((seen, plan))
        weight = weakref.ref(model.a.weight)
        assert bool(own_threads()) == (ranks > 1), "heartbeats"
        opened.close()
        assert not own_threads() and not state._parts
        assert [len(each) for each in hooks] == given
        del model
        gc.collect()
        assert weight() is None
        opened.close()  # does nothing to the session after it
        assert session.current() is not opened and not session.current().graphs
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_session_leaves_nothing_and_the_next_one_is_as_the_first(launch, ranks, monkeypatch):
    # or torch keeps the code that made each of the latest collectives, and with it what it was compiled to
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    launch(run_closed_sessions, world_size=ranks, args=(ranks,))

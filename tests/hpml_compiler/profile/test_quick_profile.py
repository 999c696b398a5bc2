"""A run without a profile -> a second's look at its devices, which prices its first plan."""
from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpml_compiler.options import Options
from hpml_compiler.plans.cache import graph_database
from hpml_compiler.profile import quick_profile, quick_profile_cache
from hpml_compiler.profile.quick_profile_cache import QuickProfile
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from passes.cost_model.measured.measured_kernels import OPTIMIZER
from passes.hardware.mesh import mesh_from_pin

SCRIPTS = {"wanted": {}, "roofline": {"costs": "roofline"}, "cluster": {"cluster": "1x2:cpu"}}


def first_step(**options: Any) -> Any:
    """The first step of a model, and whether the script's own numbers are what they are without a look."""
    torch._dynamo.reset()
    session.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    before = torch.get_rng_state()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "monitor": False, **options})
    call(torch.ones(4, 32)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    return session.current()


def look_in_a_run(rank: int, folder: str) -> None:
    os.environ.update(HPML_QUICK_PROFILE="1", HPML_CACHE_DIR=folder)
    torch.set_default_dtype(torch.float64)  # what a script sets for itself changes nothing of what is measured
    looked = {name: first_step(**options) for name, options in SCRIPTS.items()}
    assert [name for name, each in looked.items() if each.quick is not None] == ["wanted"]
    found = looked["wanted"].quick
    assert set(found.measurements.factors) >= {"matmul", "pointwise", OPTIMIZER}
    assert all(0 < factor < 1e6 for factor in found.measurements.factors.values())
    axis = mesh_from_pin({"x": 2}, local_cluster(Options.parse({}), 2)).axes[0]
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert 0 < found.collectives.collective_us(kind, axis, 2**10) <= found.collectives.collective_us(kind, axis, 2**22)
    # Ranks measured together and know the same; the plan says that it was looked for, and is priced by it.
    factors: list[Any] = [None] * 2
    dist.all_gather_object(factors, dict(found.measurements.factors))
    assert factors[0] == factors[1]
    plans = {name: each.graphs[0] for name, each in looked.items()}
    assert "look" in plans["wanted"].seconds and "look" not in plans["roofline"].seconds
    assert plans["wanted"].predicted.optimizer_us != plans["roofline"].predicted.optimizer_us
    assert not os.listdir(folder)  # nothing is kept

    with pytest.MonkeyPatch.context() as patch:  # one rank with little memory
        patch.setattr(quick_profile, "room_bytes", lambda: 2**40 if rank == 0 else 2**20)
        assert first_step().quick is None
    os.environ["HPML_QUICK_PROFILE"] = "0"
    assert first_step().quick is None


def test_a_run_without_a_profile_looks_once_and_keeps_nothing(launch, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    launch(look_in_a_run, args=(str(folder),), timeout_s=110)


def once_in_a_session(rank: int) -> None:
    os.environ["HPML_QUICK_PROFILE"] = "1"
    looks: list[int] = []
    original = quick_profile.take_quick_profile
    quick_profile.take_quick_profile = lambda *args: looks.append(1) or original(*args)
    first_step()
    model = nn.Linear(8, 8)
    torch.compile(model, backend="hpml", options={"compiler": "eager", "monitor": False})(torch.ones(2, 8)).sum().backward()
    assert len(looks) == 1 and len(session.current().graphs) == 2


def test_graphs_that_follow_use_what_the_first_one_found(launch):
    launch(once_in_a_session, timeout_s=110)


def looked_again(rank: int, folder: str) -> None:
    """An earlier look holds for a day; what is older or cannot be read is looked at anew."""
    os.environ.update(HPML_QUICK_PROFILE="1", HPML_CACHE="1", HPML_CACHE_DIR=folder)
    graph_database.get = lambda key: None  # type: ignore[assignment] # what is rewritten already is not looked at
    measured: list[QuickProfile] = []
    original = quick_profile._measure
    quick_profile._measure = lambda *args: measured.append(original(*args)) or measured[-1]
    axis = mesh_from_pin({"x": 2}, local_cluster(Options.parse({}), 2)).axes[0]
    times = [(found.measurements.factors, found.collectives.collective_us("all_reduce", axis, 2**20))
             for found in (first_step().quick for _ in range(2))]
    assert times[0] == times[1] and len(measured) == 1
    key = quick_profile_cache.profile_key(session.current().graphs[0].graph_hash, local_cluster(Options.parse({}), 2))
    # rank 0's was kept
    assert quick_profile_cache.cached_profile(key) == (measured[0] if rank == 0 else quick_profile_cache.cached_profile(key))
    old = measured[0].model_copy(update={"made": measured[0].made - quick_profile_cache.HOLDS_S})
    for entry in (old.model_dump_json(), "no look"):
        dist.barrier()
        if rank == 0:
            quick_profile_cache.plan_database.put(key, entry)
        before = len(measured)
        first_step()
        assert len(measured) == before + 1


def test_a_look_holds_for_a_day(launch, tmp_path):
    launch(looked_again, args=(str(tmp_path),), timeout_s=110)

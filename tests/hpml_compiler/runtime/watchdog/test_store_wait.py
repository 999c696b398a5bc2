"""Rank 0 alone at work, for longer than a collective waits -> the others wait, unless it is gone."""
from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from hpml_compiler.runtime.consistency.rank_sync import from_rank_0
from hpml_compiler.runtime.watchdog import barrier_check, heartbeat, store_wait
from passes.session_state import state


def made_slowly(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    heartbeat.start()
    made = from_rank_0(lambda: time.sleep(4) or "a plan")
    assert made == from_rank_0(lambda: "a plan"), "and once more"
    return made


def test_a_plan_may_take_longer_than_the_timeout_of_collectives(launch):
    assert launch(made_slowly, init=False) == ["a plan", "a plan"]


def gone(rank):
    store_wait.SILENT_S = 2.5
    heartbeat.start()
    from_rank_0(lambda: "a plan")
    start = time.monotonic()
    with pytest.raises(heartbeat.RankLost, match="rank 0"):
        from_rank_0(lambda: os._exit(0))
    return time.monotonic() - start


def test_nobody_waits_for_one_that_is_gone(launch):
    assert launch(gone, check=False)[1] < 15


def announced(rank):
    heartbeat.start()
    from_rank_0(lambda: "a plan")
    for wait in (store_wait.wait_for_all, lambda: barrier_check.require_all_ranks("saving", every=0)) if rank == 0 else ():
        start, since = time.monotonic(), time.monotonic() + 0.3
        state.put(heartbeat.LossNotice(is_announced=lambda since=since: time.monotonic() > since))
        with pytest.raises(heartbeat.RankLost, match="the others go on"):
            wait()
        assert 0.3 <= time.monotonic() - start < 3.0
    dist.barrier()


def test_a_loss_that_the_launcher_announces_ends_each_wait(launch):
    launch(announced)

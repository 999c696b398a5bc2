"""Heartbeats over time -> lost ranks, and the error of a rank that waits for none of them or in a meeting."""
from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hpml_compiler.runtime.consistency.call_hooks import forward_call
from hpml_compiler.runtime.watchdog import heartbeat
from hpml_compiler.runtime.watchdog.attribution import Heartbeat
from hpml_compiler.runtime.watchdog.barrier_check import require_all_ranks
from hpml_compiler.runtime.watchdog.heartbeat import RankLost
from hpml_compiler.runtime.watchdog.rank_status import Location
from hpml_compiler.runtime.watchdog.silent_ranks import LONGEST_S, SilentRanks


def record(beats: int, ended: bool = False) -> Heartbeat:
    return Heartbeat(beats, "forward of graph_0", False, 1.0, 0.0, ended, "", "")


def test_who_posts_nothing_new_is_gone_after_a_while():
    silence = SilentRanks(3.0)
    assert silence.gone({1: record(5), 2: record(7)}, 100.0) == []
    assert silence.gone({1: record(6), 2: record(7)}, 102.0) == []
    assert silence.gone({1: record(6), 2: record(7)}, 103.5) == [2]
    assert silence.gone({1: record(6), 2: record(8)}, 104.5) == [], "it is there again"
    assert silence.gone({1: record(6), 2: record(8)}, 105.5) == [1]
    assert silence.gone({1: record(6), 2: record(8)}, 106.0, limit_s=1.0) == [1, 2]


def test_whose_script_is_over_is_not_gone():
    silence = SilentRanks(3.0)
    assert silence.gone({1: record(5, ended=True)}, 100.0) == silence.gone({1: record(5, ended=True)}, 200.0) == []


def test_the_limit_is_within_that_of_the_group():
    assert SilentRanks.within(4.0).limit_s == 4.0 and SilentRanks.within(600.0).limit_s == LONGEST_S


def run_alone(rank, how):
    """Two ranks that need nothing of each other; rank 1 is gone after a while."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    heartbeat.start()
    heartbeat.watch_neighbor()
    call = forward_call(lambda value: value + 1, Location("forward of graph_0"), None)
    call(torch.ones(2))
    time.sleep(2.5)  # until both have posted
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        if how == "a meeting":
            require_all_ranks("hpml_compiler.full_state_dict", "all ranks call it", every=0)
        while time.monotonic() - start < 30:
            call(torch.ones(2))
            time.sleep(0.05)
    except RankLost as error:
        return str(error), time.monotonic() - start


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["a loop", "a meeting"])
def test_a_dead_rank_is_noticed_where_nobody_waits_for_it_and_in_meetings(launch, how):
    told, seconds = launch(run_alone, args=(how,), init=False, check=False, timeout_s=50)[0]
    assert "rank 1 is not responding" in told and "look at the exit code of rank 1" in told
    assert "all ranks call it" not in told and seconds < 15

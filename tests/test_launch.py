"""The launch fixture itself: results, failures, time limits, and that no process stays behind."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankFailure, RanksFailed


def _summed(rank: int, scale: float) -> tuple[float, int, str]:
    value = torch.full((2,), scale * (rank + 1))
    dist.all_reduce(value)
    return float(value[0]), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def _own_group(rank: int) -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return dist.get_world_size()


def _variable(rank: int, name: str) -> str | None:
    return os.environ.get(name)


def _second_rank_raises(rank: int) -> None:
    print(f"rank {rank} was here")
    if rank == 1:
        raise ValueError("no such weight")
    dist.barrier()


def _second_rank_dies(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    try:
        dist.barrier()
    except RuntimeError:
        return "peer is gone"
    return "peer answered"


def _sleeps_with_a_child(rank: int, folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, f"pids{rank}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def _returns_the_unpicklable(rank: int) -> object:
    return lambda: rank


def test_results_come_back_in_order_of_rank(launch):
    assert launch(_summed, world_size=3, args=(2.0,)) == [(12.0, 1, "1")] * 3


def test_without_init_the_environment_lets_a_script_make_its_own_group(launch):
    assert launch(_own_group, init=False) == [2, 2]


@pytest.mark.parametrize("value", ["a", "b"])
def test_ranks_see_the_environment_of_the_test(launch, monkeypatch, value):
    monkeypatch.setenv("HPML_EXAMPLE", value)
    assert launch(_variable, args=("HPML_EXAMPLE",), init=False) == [value, value]


def test_a_failing_rank_shows_its_traceback_and_ends_the_others(launch):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as error:
        launch(_second_rank_raises)
    text = str(error.value)
    assert "rank 1" in text and "ValueError: no such weight" in text and "rank 1 was here" in text
    assert time.monotonic() - start < 25  # less than the group's timeout: rank 0 was not waited for


def test_unchecked_ranks_see_a_peer_die_and_the_failure_shows_where(launch):
    first, second = launch(_second_rank_dies, check=False)
    assert first == "peer is gone"
    assert isinstance(second, RankFailure) and second.exitcode == -signal.SIGSEGV
    assert "in _second_rank_dies" in str(second)


def test_what_cannot_be_pickled_is_an_error_not_a_hang(launch):
    with pytest.raises(RanksFailed, match="pickle"):
        launch(_returns_the_unpicklable, world_size=1, init=False)


def test_time_limit_ends_every_rank_with_its_children_and_shows_where_they_hang(launch, tmp_path):
    with pytest.raises(RanksFailed) as error:
        launch(_sleeps_with_a_child, args=(str(tmp_path),), timeout_s=5, init=False)
    assert "in _sleeps_with_a_child" in str(error.value) and len(error.value.failures) == 2
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"pids{rank}").read_text().split()]
    alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert len(pids) == 4 and not alive

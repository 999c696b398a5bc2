"""Heartbeats of ranks -> the rank that the others name."""
from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from hpml_compiler.runtime.watchdog.attribution import Heartbeat, RankError, attribute_failure, is_distributed, operation_of

HERE = "in backward of graph_0, call 3"


def record(beats=5, at="backward of graph_0, call 3", inside=True, age_s=2.0, ended=False, raised="", line=""):
    return Heartbeat(beats, at, inside, age_s, time.time(), ended, raised, line)


def failure(rank, error, secondary=False):
    return RankError(rank, error, "after forward of graph_0, call 3", time.time(), secondary)


def alive(**second):
    return {r: record() for r in range(3)}, {r: second.get(f"r{r}", record(beats=7)) for r in range(3)}


CASES = {
    "failed": ([failure(0, "rank 2 is gone", True), failure(2, "ValueError: no such weight")], alive(),
               "s ago after forward of graph_0, call 3, with ValueError: no such weight"),
    "gone": ([], alive(r2=record(beats=5)), "rank 2 is not responding"),
    "both gone": ([], alive(r2=record(beats=5), r0=record(beats=5)), "ranks [0, 2] are not responding"),
    "noticed by another, who is gone since": (
        [failure(0, "RankLost: rank 2 is late: for 9 s", True)], alive(r0=record(beats=5)),
        "rank 2 is late: for 9 s (reported by rank 0)"),
    "this rank itself": (
        [failure(0, "RankLost: rank 1 is late: for 9 s", True)], alive(r0=record(beats=5)),
        "rank 0 stopped waiting for this rank: rank 1 is late"),
    "ended": ([], alive(r2=record(beats=7, inside=False, ended=True)), "rank 2 is already at the end of the script"),
    "asleep": ([], alive(r2=record(beats=7, inside=False, age_s=31, line="train.py:9 in main")),
               "rank 2 is late: outside of compiled calls for 31 s, after backward of graph_0, call 3, at train.py:9 in main"),
    "caught its error": ([], alive(r0=record(beats=7, inside=False), r2=record(beats=7, inside=False, raised="KeyError: 3")),
                         "having caught KeyError: 3"),
    "evaluates alone": ([], alive(r2=record(beats=7, at="forward of graph_1, call 1")),
                        "rank 2 is in forward of graph_1, call 1, while this rank is in backward of graph_0"),
    "compiles alone": ([], alive(r2=record(beats=7, at="comparing the graph with the other ranks'")),
                       "rank 2 is in comparing the graph"),
    "nothing to see": ([], alive(), "all ranks are alive and at the same place"),
    "never came": ([], ({0: record(), 1: record()}, {0: record(beats=7), 1: record(beats=7)}), "rank 2 is missing"),
}


@pytest.mark.parametrize("case", CASES)
def test_culprits(case):
    failures, (first, second), said = CASES[case]
    what, next_step = attribute_failure(1, 3, failures, first, second, HERE)
    assert said in what and next_step


def test_errors_of_collectives_are_known():
    assert is_distributed(RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"))
    assert is_distributed(dist.DistNetworkError("x"))
    assert not is_distributed(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_distributed(ValueError("gloo"))


def test_the_collective_is_read_off_the_line_that_failed():
    def all_reduce():
        raise RuntimeError("gloo")

    try:
        all_reduce()
    except RuntimeError as error:
        assert operation_of(error) == ", all_reduce"

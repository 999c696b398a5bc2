"""Attribute a hang or an error to the rank that caused it, from the heartbeats of all ranks."""
from __future__ import annotations

import linecache
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hpml_compiler.runtime.process.out_of_memory import memory_failure


@dataclass(frozen=True)
class Heartbeat:
    """Latest status that a rank posted. beats: number of posts. age_s: time in its place when it posted. calls,
    meetings, meets: see `RankStatus`. waits_in: collective of torch.distributed that its script has been in for a while."""

    beats: int
    at: str
    inside: bool
    age_s: float
    posted: float
    ended: bool
    raised: str
    line: str
    calls: int = 0
    meetings: int = 0
    meets: str = ""
    waits_in: str = ""

    @property
    def place(self) -> str:
        return f"{'in' if self.inside else 'after'} {self.at}"


@dataclass(frozen=True)
class RankError:
    """An exception that ended a rank. secondary: it was caused by another rank that was late or gone."""

    rank: int
    error: str
    place: str
    when: float
    secondary: bool


_SYMPTOMS = re.compile(r"gloo|nccl|c10d|\bstore\b|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)
_OPERATION = re.compile(r"(all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast\w*|barrier|full_tensor)")


def is_distributed(error: BaseException) -> bool:
    """True if an error comes from a failed collective or store; not if this rank had no memory for one."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_SYMPTOMS.search(str(error))) and not memory_failure(error)


def operation_of(error: BaseException) -> str:
    """Name of the collective in whose line of code the error was raised, as `, all_reduce`; "" if unknown."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    for filename, number in reversed(frames):
        line = linecache.getline(filename, number)
        if waited := re.search(r"wait_tensor\.default\((\w+)", line):  # compiled code: find where it was issued
            for earlier in reversed(linecache.getlines(filename)[:number]):
                if re.search(rf"\b{waited[1]}\b\s*=", earlier) and (found := _OPERATION.search(earlier)):
                    return f", {found[1]}"
        if found := _OPERATION.search(line):
            return f", {found[1]}"
    return ""


def attribute_failure(rank: int, world: int, failures: Sequence[RankError], first: Mapping[int, Heartbeat],
                      second: Mapping[int, Heartbeat], here: str) -> tuple[str, str]:
    """(cause, next step) of a failure, as seen by `rank`, which waits at `here`.

    first, second: heartbeats from two readings, far enough apart that every live rank has posted in between.
    """
    for failure in failures:
        if not failure.secondary and failure.rank != rank:
            return (f"rank {failure.rank} failed {_ago(time.time() - failure.when)} {failure.place}, with {failure.error}",
                    f"look at the traceback of rank {failure.rank}; the other ranks only waited for it")
    others = {r: record for r, record in second.items() if r != rank}
    ended = [r for r, record in others.items() if record.ended]
    gone = [r for r, record in others.items() if not record.ended and r in first and first[r].beats == record.beats]
    noticed = {failure.rank: failure for failure in failures if failure.secondary and failure.rank != rank}
    silent = [r for r in gone if r not in noticed]
    if silent:
        record = others[silent[0]]
        return (f"{_ranks(silent)} not responding (killed, stopped, out of memory, or its machine failed); last status, "
                f"{_ago(time.time() - record.posted)}: {record.place}{_caught(record)}{_line(record)}",
                f"look at the exit code of rank {silent[0]} and at the kernel's log (dmesg)")
    if noticed:
        failure = min(noticed.values(), key=lambda f: f.when)
        if re.search(rf"\branks? \[?{rank}\b", failure.error):
            return (f"rank {failure.rank} stopped waiting for this rank: {failure.error.split(': ', 1)[-1]}",
                    "find out why this rank was late; HPML_PG_TIMEOUT_S sets the timeout")
        return (failure.error.split(": ", 1)[-1] + f" (reported by rank {failure.rank})",
                "look at that rank first; the others only waited for it")
    if ended:
        record = others[ended[0]]
        return (f"{_ranks(ended)} already at the end of the script ({_ago(time.time() - record.posted)}): "
                f"{record.place}{_caught(record)}, with no further calls",
                "give all ranks the same number of batches (len of the loader on each rank)")
    missing = sorted(set(range(world)) - set(second) - {rank})
    if missing:
        return (f"{_ranks(missing)} missing: no graph was compiled there yet",
                "all ranks must call the compiled model together; find out what that rank does instead")
    raised = [r for r, record in others.items() if record.raised and not record.inside]
    late = raised or [r for r, record in others.items() if not record.inside]
    if late:
        record = others[late[0]]
        return (f"{_ranks(late)} late: outside of compiled calls for {record.age_s:.0f} s, {record.place}"
                f"{_caught(record)}{_line(record)}",
                "all ranks must make the same calls in the same order: look for work of a single rank (a checkpoint, an "
                "evaluation, a slow loader); HPML_PG_TIMEOUT_S sets the timeout")
    elsewhere = [r for r, record in others.items() if record.place != here]
    if elsewhere:
        record = others[elsewhere[0]]
        return (f"{_ranks(elsewhere)} {record.place}{_line(record)}, while this rank is {here}",
                "all ranks must make the same calls in the same order: look for an evaluation on a single rank, unequal "
                "numbers of batches, and a model or batch of another shape that only one rank compiles")
    return ("a collective failed although all ranks are alive and at the same place",
            "check the network between the ranks; a slow rank may need a longer HPML_PG_TIMEOUT_S")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list(ranks)} are"


def _ago(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s ago"


def _caught(record: Heartbeat) -> str:
    return f", having caught {record.raised}" if record.raised else ""


def _line(record: Heartbeat) -> str:
    return f", at {record.line}" if record.line else ""

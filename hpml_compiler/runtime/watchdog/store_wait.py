"""Waiting for what one rank, or each, does alone, while it is alive: a collective would wait no longer than its timeout."""
from __future__ import annotations

import time
from collections.abc import Sequence

from hpml_compiler.runtime.watchdog import heartbeat

LOOK_S, SILENT_S = 1.0, 5.0
"""How often a rank that waits looks whether rank 0 still posts what it does, and after what time without a post it looks no
longer."""
_turns = 0


def wait_for_rank_0() -> None:
    """Rank 0 calls this when it is done, the others at the same point of the program: they return when it is, or when it seems
    to be gone. A collective that follows says so in its own time."""
    _after([0])


def wait_for_all() -> None:
    """The same, where all have something to do: each returns when all are done."""
    board = heartbeat.board()
    _after(range(board.world if board is not None else 1))


def _after(ranks: Sequence[int]) -> None:
    global _turns
    _turns += 1
    board = heartbeat.board()
    if board is None:
        return
    key = f"turn{_turns}"
    if board.rank in ranks and (board.add(key, 1) == len(ranks) or len(ranks) == 1):
        return
    beats: dict[int, int] = {}
    heard = dict.fromkeys(ranks, time.monotonic())
    looked, pause_s = time.monotonic(), 0.001
    while board.add(key, 0) < len(ranks) and time.monotonic() - min(heard.values()) < SILENT_S:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            for rank, record in board.records().items():
                if rank in heard and record.beats != beats.get(rank, -1):
                    beats[rank], heard[rank] = record.beats, looked

"""Wait for work that ranks do alone, as long as they are alive; a collective would give up after its timeout."""
from __future__ import annotations

import time
from collections.abc import Sequence

from hpml_compiler.runtime.watchdog import heartbeat

LOOK_S, SILENT_S = 1.0, 5.0
"""Interval at which a waiting rank checks the heartbeats of the others, and time without one after which it stops waiting."""


def wait_for_rank_0() -> None:
    """Wait until rank 0 has called this too, or seems to be gone; a collective that follows then raises. Rank 0 itself does
    not wait. Raises RankLost where the launcher says that a rank is."""
    _after([0])


def wait_for_all() -> None:
    """Wait until all ranks have called this."""
    board = heartbeat.board()
    _after(range(board.world if board is not None else 1))


def _after(ranks: Sequence[int]) -> None:
    board = heartbeat.board()
    if board is None:
        return
    board.live.turns += 1
    key = f"turn{board.live.turns}"
    if board.rank in ranks and (board.add(key, 1) == len(ranks) or len(ranks) == 1):
        return
    beats: dict[int, int] = {}
    heard = dict.fromkeys(ranks, time.monotonic())
    looked, pause_s = time.monotonic(), 0.001
    while board.add(key, 0) < len(ranks) and time.monotonic() - min(heard.values()) < SILENT_S:
        heartbeat.stop_if_lost()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            for rank, record in board.records().items():
                if rank in heard and record.beats != beats.get(rank, -1):
                    beats[rank], heard[rank] = record.beats, looked

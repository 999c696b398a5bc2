"""Waiting for what rank 0 does alone, for as long as it is alive: a collective would wait no longer than its timeout."""
from __future__ import annotations

import time

from hpml_compiler.runtime import lost_ranks

LOOK_S, SILENT_S = 1.0, 5.0
"""How often a rank that waits looks whether rank 0 still posts what it does, and after what time without a post it looks no
longer."""
_turns = 0


def after_rank_0() -> None:
    """Rank 0 calls this when it is done, the others at the same point of the program: they return when it is, or when it seems
    to be gone. A collective that follows says so in its own time."""
    global _turns
    _turns += 1
    board = lost_ranks.board()
    if board is None:
        return
    key = f"turn{_turns}"
    if board.rank == 0:
        board.add(key, 1)
        return
    beats, heard = -1, time.monotonic()
    looked, pause_s = heard, 0.001
    while not board.add(key, 0) and time.monotonic() - heard < SILENT_S:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            record = board.records().get(0)
            if record is not None and record.beats != beats:
                beats, heard = record.beats, looked

"""All ranks are to do this together: if one rank does it alone, it hears so within seconds, and what to do instead."""
from __future__ import annotations

import time

from hpml_compiler.runtime import lost_ranks
from hpml_compiler.runtime.blame import SignOfLife
from hpml_compiler.runtime.doing import doing
from passes.errors import HpmlError

EVERY_CALLS = 16
"""Calls of graphs after which gathering outside of graphs is checked again: a step that gathers a norm should not wait for
the store each time."""
LOOK_S, SURE_S = 1.0, 3.0

GATHERING = ("every rank holds a part of the model, so all ranks must do this: move it out of `if rank == 0:`. For one file, "
             "all ranks call `state = hpml_compiler.full_state_dict(model, optimizer)`, and rank 0 saves what it gets; or save "
             "with torch.distributed.checkpoint")
CALLING = ("the model is split over all ranks, so all ranks call it together: move the evaluation out of `if rank == 0:`, and "
           "let rank 0 alone print the result")


class Alone(HpmlError):
    """One rank does what all must do together."""


class _Checked:
    """How many calls this rank had made when it last met the others, and the key under which it did."""

    calls, key = -EVERY_CALLS, ""


def together(what: str, next_step: str = GATHERING, every: int = EVERY_CALLS) -> None:
    """To be called before something that waits for all ranks. Raises `Alone` if another rank is past this point of the
    script, or at its end, without having come here. Costs nothing if fewer than `every` calls of graphs were made since
    the last time, which is the same on all ranks that do the same."""
    if doing.calls - _Checked.calls < every:
        return
    _Checked.calls = doing.calls
    board = lost_ranks.board()
    if board is None:
        return
    doing.meetings += 1
    doing.meets = what
    try:
        _meet(board, what, next_step)
    finally:
        doing.meets = ""


def _meet(board: lost_ranks.SharedBoard, what: str, next_step: str) -> None:
    key = f"meeting{doing.meetings}/{what}"
    begun = looked = time.monotonic()
    pause_s = 0.0002
    here = board.add(key, 1)
    while here < board.world:
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)
        here = board.add(key, 0)
        now = time.monotonic()
        if here < board.world and now - looked > LOOK_S:
            looked = now
            found = ((rank, _does_instead(record, what, now - begun, board.timeout_s))
                     for rank, record in board.records().items() if rank != board.rank)
            rank, does = next(((rank, does) for rank, does in found if does), (-1, ""))
            if does and board.add(key, 0) < board.world:  # it may have come and gone meanwhile
                raise Alone(f"rank {board.rank} is alone in {what}: rank {rank} is {does} and does not take part",
                            f"rank {board.rank}, {doing.place()}", next_step)
    if board.rank == 0 and _Checked.key:  # all are here, so none is still there
        board.forget(_Checked.key)
    _Checked.key = key


def _does_instead(record: SignOfLife, what: str, waited_s: float, timeout_s: float) -> str:
    """What shows that another rank will not come; "" if it still may, or is here."""
    line = f" ({record.line})" if record.line else ""
    if record.meetings == doing.meetings:
        return f"in {record.meets}{line}" if record.meets not in ("", what) else ""
    if record.meetings > doing.meetings:
        return ""
    if record.ended:
        return f"at the end of the script{line}"
    if record.calls > doing.calls or waited_s > timeout_s:
        return f"{record.place}{line}"
    if record.waits_in and waited_s > SURE_S:
        return f"in {record.waits_in} of torch.distributed{line}"
    return ""

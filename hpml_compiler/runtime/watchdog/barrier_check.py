"""Monitored barrier: if one rank does alone what all ranks must do together, it raises within seconds, with the next step.

It also raises if a call of a graph fails on one rank alone and its script catches that: the other ranks are still in the call,
in a collective that would match the next one of this rank.
"""
from __future__ import annotations

import sys
import time

import torch.distributed as dist

from hpml_compiler.runtime.watchdog import heartbeat
from hpml_compiler.runtime.watchdog.attribution import Heartbeat
from hpml_compiler.runtime.watchdog.rank_status import RankStatus
from hpml_compiler.runtime.watchdog.silent_ranks import SilentRanks
from passes.errors import HpmlError
from passes.session_state import state_of

EVERY_CALLS = 16
"""Calls of graphs between two checks of gathers outside of graphs: a step that gathers a norm should not wait for
the store each time."""
LOOK_S, SURE_S = 1.0, 3.0
FAILING_S = 5.0
"""Time after a rank's failure in a call within which the others must fail there too."""

GATHERING = ("the model is sharded over all ranks, so all ranks must do this: move it out of `if rank == 0:`. For one file, "
             "call `state = hpml_compiler.full_state_dict(model, optimizer)` on all ranks and save it on rank 0; or save "
             "with torch.distributed.checkpoint")
CALLING = ("the model is sharded over all ranks, so all ranks must call it together: move the evaluation out of "
           "`if rank == 0:`, and print the result on rank 0")


ONE_SENDER = ("broadcast_object_list", "scatter_object_list", "send_object_list")
"""Functions of torch.distributed in which one rank pickles and sends objects, and the others only receive."""


class RankDiverged(HpmlError):
    """One rank does alone something that all ranks must do together, or failed where the others did not."""


class _LastCheck:
    """This rank's call count and store key at its last barrier. until: time until which a failed rank waits for the others to
    fail too; 0 if it is not waiting."""

    def __init__(self) -> None:
        self.calls, self.key, self.until = -EVERY_CALLS, "", 0.0


def require_all_ranks(what: str, next_step: str = GATHERING, every: int = EVERY_CALLS) -> None:
    """Barrier before something that waits for all ranks. Raises `RankDiverged` if another rank has passed this point of the
    script, or ended, without coming here. Skipped, at no cost, if fewer than `every` calls of graphs were made since the last
    barrier; that count is the same on all ranks that do the same."""
    all_failed_or_none()
    status, last = state_of(RankStatus), state_of(_LastCheck)
    if status.calls - last.calls < every:
        return
    last.calls = status.calls
    board = heartbeat.board()
    if board is None:
        return
    status.meetings += 1
    status.meets = what
    _meet(board, what, next_step)
    status.meets = ""  # not after an error: a rank that looks later must see the purpose of this barrier


def refuse_single_sender() -> None:
    """Check before a sharded tensor is gathered for pickling. Raises `RankDiverged` inside of torch.distributed functions in
    which the other ranks only receive: they would never gather."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ONE_SENDER and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            raise RankDiverged(f"this rank alone would gather a tensor of the model that {name} sends",
                               f"torch.distributed.{name}", GATHERING)
        frame = frame.f_back


def note_failure(error: BaseException) -> None:
    """Record that a call of a graph failed here. If it fails on all ranks, they may go on, otherwise none may."""
    board, status = heartbeat.board(), state_of(RankStatus)
    if board is None or status.failed:
        return
    status.failed = f"{status.at} ({type(error).__name__}: {error})".splitlines()[0][:300]
    try:
        board.add(_failures(), 1)
    except (RuntimeError, OSError):  # the store is gone: `all_failed_or_none` will raise
        return


def all_failed_or_none() -> None:
    """Check before anything that communicates. Raises `RankDiverged` on a rank that failed in a call that did not fail on all
    ranks."""
    status = state_of(RankStatus)
    if not status.failed:
        return
    board, last = heartbeat.board(), state_of(_LastCheck)
    failed, pause_s = 0, 0.001
    last.until = last.until or time.monotonic() + FAILING_S
    while board is not None:
        try:
            failed = board.add(_failures(), 0)
        except (RuntimeError, OSError):
            break
        if failed == board.world:
            status.failed, status.raised, last.until = "", "", 0.0
            return
        if time.monotonic() > last.until:
            break
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
    raise RankDiverged(f"this rank caught an error in {status.failed}, but not all ranks failed there: others may still be "
                       "in a collective, which the next collective of this rank would match", f"rank {dist.get_rank()}",
                       "exit the process, and restart all ranks from a checkpoint; check on all ranks before a step whether "
                       "it can run, instead of catching its errors")


def _failures() -> str:
    return f"failed{state_of(RankStatus).calls}"


def _meet(board: heartbeat.SharedBoard, what: str, next_step: str) -> None:
    status, last = state_of(RankStatus), state_of(_LastCheck)
    key = f"meeting{status.meetings}/{what}"
    begun = looked = time.monotonic()
    pause_s = 0.0002
    here, silence = board.add(key, 1), SilentRanks.within(board.timeout_s)
    while here < board.world:
        heartbeat.stop_if_lost()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)
        here = board.add(key, 0)
        now = time.monotonic()
        if here < board.world and now - looked > LOOK_S:
            looked = now
            records = {rank: record for rank, record in board.records().items() if rank != board.rank}
            # After the timeout, a rank that does something else must be distinguished from one that is gone.
            if gone := silence.gone(records, now, SURE_S if now - begun > board.timeout_s else None):
                raise board.lost({rank: records[rank] for rank in gone}, records)
            if len(records) + 1 < board.world and now - begun > board.timeout_s:  # a rank ended before its first heartbeat
                raise board.lost({}, records)
            found = ((rank, _does_instead(record, what, now - begun, board.timeout_s)) for rank, record in records.items())
            rank, does = next(((rank, does) for rank, does in found if does), (-1, ""))
            if does and board.add(key, 0) < board.world:  # it may have passed the barrier meanwhile
                raise RankDiverged(f"rank {board.rank} is alone in {what}: rank {rank} is {does}",
                                   f"rank {board.rank}, {status.place()}", next_step)
    if board.rank == 0 and last.key:  # all ranks are here, so none needs the last key
        board.forget(last.key)
    last.key = key


def _does_instead(record: Heartbeat, what: str, waited_s: float, timeout_s: float) -> str:
    """Evidence that another rank will not come to the barrier; "" if it still may, or is here."""
    line, status = f" ({record.line})" if record.line else "", state_of(RankStatus)
    if record.meetings == status.meetings:
        return f"in {record.meets}{line}" if record.meets not in ("", what) else ""
    if record.meetings > status.meetings:
        return ""
    if record.ended:
        return f"at the end of the script{line}"
    if record.calls > status.calls or waited_s > timeout_s:
        return f"{record.place}{line}"
    if record.waits_in and waited_s > SURE_S:
        return f"in {record.waits_in} of torch.distributed{line}"
    return ""

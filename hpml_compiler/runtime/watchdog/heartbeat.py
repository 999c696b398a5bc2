"""Heartbeats: each rank posts its status to the process group's store, so that errors name a rank that is late or gone."""
from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hpml_compiler.runtime.process.world_group import group_timeout
from hpml_compiler.runtime.watchdog.attribution import Heartbeat, RankError, attribute_failure, is_distributed, operation_of
from hpml_compiler.runtime.watchdog.error_file import write_error_file
from hpml_compiler.runtime.watchdog.rank_status import RankStatus, StallWatch
from hpml_compiler.runtime.watchdog.silent_ranks import SilentRanks
from hpml_compiler.runtime.watchdog.status_store import StatusStore, quiet_store
from passes import compat
from passes.errors import HpmlError
from passes.session_state import state, state_of

log = logging.getLogger("hpml")
INTERVAL_S = 1.0
SPEAK_S = 10.0  # time in one call of a graph after which a warning names the missing ranks
STORE_TIMEOUT_S = 5


class RankLost(HpmlError):
    """A rank is late or gone, and this rank waited for it."""


class _Liveness:
    def __init__(self, board: StatusStore) -> None:
        self.board, self.status = board, state_of(RankStatus)
        self.watch = StallWatch(self.status)
        self.interval_s = max(INTERVAL_S, board.world / 256)
        self.lock, self.over = threading.Lock(), threading.Event()
        # Well before the timeout: users should not wait for it, and NCCL then ends the process without an exception.
        self.speaks_after_s = min(SPEAK_S, 0.5 * group_timeout().total_seconds())
        self.spoke_of = ""
        self.silence: SilentRanks | None = None  # tracks a neighbor, see `watch_neighbor`
        self.lost: RankLost | None = None
        self.turns = 0  # of `store_wait`
        self.thread = threading.Thread(target=self._beat, name="hpml-lost-ranks", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        while not self.over.wait(self.interval_s):
            try:
                with self.lock, quiet_store():
                    self.board.post(self.watch)
                waits = self.status.inside and self.status.at.calls and self.watch.age_s() > self.speaks_after_s
                if waits and self.status.place() != self.spoke_of:
                    self._speak()
                if self.silence is not None and self.lost is None:
                    self.lost = self._look_at_neighbor(self.silence)
            except (RuntimeError, OSError) as error:  # the store is gone; a waiting rank will report that
                log.debug("this rank stopped posting heartbeats: %s", error)
                return

    def _look_at_neighbor(self, silence: SilentRanks) -> RankLost | None:
        """Error to raise in the next call if the neighbor is gone or has failed."""
        neighbor = (self.board.rank + 1) % self.board.world
        with self.lock:
            records = self.board.records([neighbor])
            failures = [each for each in self.board.failures() if each.rank == neighbor and not each.secondary]
        if not failures and not silence.gone(records, time.monotonic()):
            return None
        return self.lost_of(failures, records, records)

    def lost_of(self, failures: Sequence[RankError], gone: dict[int, Heartbeat], records: dict[int, Heartbeat]) -> RankLost:
        """Error to raise for ranks whose heartbeats have stopped."""
        what, next_step = attribute_failure(self.board.rank, self.board.world, failures, gone, records, self.status.place())
        return RankLost(what, f"rank {self.board.rank}, {self.status.place()}", next_step)

    def _speak(self) -> None:
        """Warn about the ranks that this rank waits for, while still posting. The first of the waiting ranks does it."""
        readings, here, self.spoke_of = [], self.status.place(), self.status.place()
        for number in range(2):
            self.over.wait(2.2 * self.interval_s * number)
            with self.lock:
                self.board.post(self.watch)
                readings.append(self.board.records())
        waiting = [rank for rank, record in readings[1].items() if record.place == here]
        if self.status.place() != here or waiting[:1] != [self.board.rank] or len(waiting) == self.board.world:
            return
        what, next_step = attribute_failure(self.board.rank, self.board.world, self.board.failures(), readings[0], readings[1],
                                            here)
        log.warning("%s", RankLost(what, f"rank {self.board.rank}, {here}, where it has waited for {self.watch.age_s():.0f} s",
                                   next_step))

    def stop(self, ended: bool) -> None:
        if self.over.is_set():
            return
        self.over.set()
        self.thread.join(STORE_TIMEOUT_S)
        if ended:
            self._post(lambda: self.board.post(self.watch, ended=True))

    def fail(self, error: BaseException, secondary: bool) -> None:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        failure = RankError(self.board.rank, text, self.status.place(), time.time(), secondary)
        self._post(lambda: self.board.post_failure(failure))

    def _post(self, what: Any) -> None:
        try:
            with self.lock, quiet_store():
                what()
        except (RuntimeError, OSError) as error:
            log.debug("the store is gone: %s", error)

    def name(self, error: BaseException) -> RankLost:
        """Error with the reason why a collective failed here, from the heartbeats of the other ranks."""
        where = f"rank {self.board.rank}, {self.status.place()}{operation_of(error)}"
        reported = str(error).strip().splitlines()
        try:
            with self.lock:
                failures, first = self.board.failures(), self.board.records()
            second = first
            if not any(not failure.secondary and failure.rank != self.board.rank for failure in failures):
                time.sleep(2.2 * self.interval_s)  # live ranks post again meanwhile
                with self.lock:
                    failures, second = self.board.failures(), self.board.records()
            what, next_step = attribute_failure(self.board.rank, self.board.world, failures, first, second, self.status.place())
        except (RuntimeError, OSError):
            owner = "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            what = f"a collective failed, and so did the store with the heartbeats, since {owner} has exited"
            next_step = f"check the last output of {owner}"
        return RankLost(what, f"{where}; torch says: {reported[0] if reported else type(error).__name__}"[:600], next_step)


class _Heartbeats:
    """live: of `group`, the group of all ranks. starts: groups of this session so far."""

    def __init__(self) -> None:
        self.group: Any = None
        self.live: _Liveness | None = None
        self.starts = 0

    def close(self) -> None:
        if self.live is not None:
            self.live.stop(ended=False)
            self.live = None


def start() -> None:
    """Start posting heartbeats; once per process group, on all ranks."""
    running = state_of(_Heartbeats)
    if running.live is not None and running.group is dist.group.WORLD:
        return
    running.close()
    state_of(RankStatus).failed = ""
    running.starts += 1
    prefix = f"hpml/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{state.ended}.{running.starts}"
    try:
        store = compat.side_store(prefix, STORE_TIMEOUT_S)
    except RuntimeError as error:
        log.warning("this rank cannot post heartbeats: the store refused a second connection: %s", error)
        return
    if store is None:
        return
    running.group, running.live = dist.group.WORLD, _Liveness(StatusStore(store, dist.get_rank(), dist.get_world_size()))
    _watch_ends()


def watch_neighbor() -> None:
    """Start watching the next rank: in graphs that are not split, no rank waits for another."""
    live = _current()
    if live is not None and live.silence is None:
        live.silence = SilentRanks.within(group_timeout().total_seconds())


def neighbor_is_there() -> None:
    """Raises RankLost if the watched rank is gone. Costs nothing."""
    if (live := _current()) is not None and live.lost is not None:
        raise live.lost


def _current() -> _Liveness | None:
    return state_of(_Heartbeats).live


def _at_exit() -> None:
    live = _current()
    if live is not None:
        live.stop(ended=not getattr(sys, "last_value", None))


@dataclass(frozen=True)
class SharedBoard:
    """Access to the store for the main thread."""

    live: _Liveness

    @property
    def rank(self) -> int:
        return self.live.board.rank

    @property
    def world(self) -> int:
        return self.live.board.world

    @property
    def timeout_s(self) -> float:
        return group_timeout().total_seconds()

    def add(self, key: str, amount: int) -> int:
        with self.live.lock:
            return self.live.board.store.add(key, amount)

    def forget(self, key: str) -> None:
        with self.live.lock:
            self.live.board.store.delete_key(key)

    def records(self) -> dict[int, Heartbeat]:
        with self.live.lock:
            return self.live.board.records()

    def lost(self, gone: dict[int, Heartbeat], records: dict[int, Heartbeat]) -> RankLost:
        with self.live.lock:
            failures = self.live.board.failures()
        return self.live.lost_of(failures, gone, records)


def board() -> SharedBoard | None:
    live = _current()
    return None if live is None else SharedBoard(live)


class LossNotice:
    """is_known: a launcher that lets the other ranks go on knows that one is lost; it may wait a little to learn that.
    is_announced: it has said so already."""

    def __init__(self, is_known: Callable[[], bool] = lambda: False, is_announced: Callable[[], bool] = lambda: False) -> None:
        self.is_known, self.is_announced = is_known, is_announced


def stop_if_lost() -> None:
    """Check while waiting for other ranks at the store, which no lost connection ends. Raises RankLost."""
    live = _current()
    if live is not None and state_of(LossNotice).is_announced():
        raise _others_go_on(live)


def _others_go_on(live: _Liveness) -> RankLost:
    return RankLost("a rank is lost, and the others go on", f"rank {live.board.rank}, {live.status.place()}",
                    "run each step in an attempt: hpml_compiler.attempts")


def name_lost_rank(error: Exception) -> Exception:
    """The error to raise in place of one from a collective: it names the rank that is late or gone. Other errors are
    returned unchanged, and recorded in this rank's status."""
    live = _current()
    if live is None or isinstance(error, RankLost):
        return error
    if not is_distributed(error):
        state_of(RankStatus).raised = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return error
    if state_of(LossNotice).is_known():
        return _others_go_on(live)
    lost = live.name(error)
    live.fail(lost, secondary=True)
    return lost


@functools.cache
def _watch_ends() -> None:
    """Report the end of this process, and an error that ends it, to the heartbeats that then run."""
    atexit.register(_at_exit)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        live, lost = _current(), None
        if live is not None and not isinstance(error, RankLost):
            if is_distributed(error):  # such as in a gather outside of compiled graphs
                lost = live.name(error)
            live.fail(lost or error, secondary=lost is not None)
        write_error_file(lost or error, noticed=isinstance(lost or error, RankLost))
        before(kind, error, traceback)
        if lost is not None:
            print(f"hpml: {lost}", file=sys.stderr, flush=True)

    sys.excepthook = hook

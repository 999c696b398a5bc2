"""Heartbeats: each rank posts its status to the process group's store, so that errors name a rank that is late or gone."""
from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from hpml_compiler.runtime.process.world_group import group_timeout
from hpml_compiler.runtime.watchdog.attribution import Heartbeat, RankError, attribute_failure, is_distributed, operation_of
from hpml_compiler.runtime.watchdog.error_file import write_error_file
from hpml_compiler.runtime.watchdog.rank_status import StallWatch, collective_of_script, line_of_script, this_rank
from hpml_compiler.runtime.watchdog.silent_ranks import SilentRanks
from passes import compat
from passes.errors import HpmlError

log = logging.getLogger("hpml")
INTERVAL_S = 1.0
SLOW_S = 3.0  # time in one place after which a heartbeat includes the line of the script
SPEAK_S = 10.0  # time in one call of a graph after which a warning names the missing ranks
STORE_TIMEOUT_S = 5


class RankLost(HpmlError):
    """A rank is late or gone, and this rank waited for it."""


@dataclass
class _StatusStore:
    """Heartbeats and failures in the store, over a connection of this thread's own."""

    store: Any
    rank: int
    world: int
    beats: int = 0
    collective: tuple[str, int] = ("", 0)
    """The script's collective at the last post."""

    def post(self, watch: StallWatch, ended: bool = False) -> None:
        age = watch.age_s()
        self.beats += 1
        before, self.collective = self.collective, collective_of_script() if age > SLOW_S and not this_rank.inside else ("", 0)
        record = Heartbeat(self.beats, str(this_rank.at), this_rank.inside, age, time.time(), ended, this_rank.raised,
                        line_of_script() if age > SLOW_S else "", this_rank.calls, this_rank.meetings, this_rank.meets,
                        self.collective[0] if self.collective == before else "")
        self.store.set(f"record{self.rank}", json.dumps(asdict(record)))

    def post_failure(self, failure: RankError) -> None:
        number = self.store.add("failures", 1)
        self.store.set(f"failure{number}", json.dumps(asdict(failure)))

    def records(self, ranks: Iterable[int] | None = None) -> dict[int, Heartbeat]:
        """Latest heartbeats by rank. ranks: None for all."""
        keys = {rank: f"record{rank}" for rank in (range(self.world) if ranks is None else ranks)}
        return {rank: Heartbeat(**json.loads(self.store.get(key))) for rank, key in keys.items() if self.store.check([key])}

    def failures(self) -> list[RankError]:
        keys = [f"failure{number}" for number in range(1, self.store.add("failures", 0) + 1)]
        return [RankError(**json.loads(self.store.get(key))) for key in keys if self.store.check([key])]


@contextlib.contextmanager
def _quiet_store() -> Any:
    """Silence the backtrace that the store's client prints once the store is gone; rank 0 may end first."""
    before = compat.set_cpp_log_level(2)
    try:
        yield
    finally:
        if before is not None:
            compat.set_cpp_log_level(before)


class _Liveness:
    def __init__(self, board: _StatusStore) -> None:
        self.board, self.watch = board, StallWatch()
        self.interval_s = max(INTERVAL_S, board.world / 256)
        self.lock, self.over = threading.Lock(), threading.Event()
        # Well before the timeout: users should not wait for it, and NCCL then ends the process without an exception.
        self.speaks_after_s = min(SPEAK_S, 0.5 * group_timeout().total_seconds())
        self.spoke_of = ""
        self.silence: SilentRanks | None = None  # tracks a neighbor, see `watch_neighbor`
        self.lost: RankLost | None = None
        self.thread = threading.Thread(target=self._beat, name="hpml-lost-ranks", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        while not self.over.wait(self.interval_s):
            try:
                with self.lock, _quiet_store():
                    self.board.post(self.watch)
                waits = this_rank.inside and this_rank.at.calls and self.watch.age_s() > self.speaks_after_s
                if waits and this_rank.place() != self.spoke_of:
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
        what, next_step = attribute_failure(self.board.rank, self.board.world, failures, gone, records, this_rank.place())
        return RankLost(what, f"rank {self.board.rank}, {this_rank.place()}", next_step)

    def _speak(self) -> None:
        """Warn about the ranks that this rank waits for, while still posting. The first of the waiting ranks does it."""
        readings, here, self.spoke_of = [], this_rank.place(), this_rank.place()
        for number in range(2):
            self.over.wait(2.2 * self.interval_s * number)
            with self.lock:
                self.board.post(self.watch)
                readings.append(self.board.records())
        waiting = [rank for rank, record in readings[1].items() if record.place == here]
        if this_rank.place() != here or waiting[:1] != [self.board.rank] or len(waiting) == self.board.world:
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
        self._post(lambda: self.board.post_failure(RankError(self.board.rank, text, this_rank.place(), time.time(), secondary)))

    def _post(self, what: Any) -> None:
        try:
            with self.lock, _quiet_store():
                what()
        except (RuntimeError, OSError) as error:
            log.debug("the store is gone: %s", error)

    def name(self, error: BaseException) -> RankLost:
        """Error with the reason why a collective failed here, from the heartbeats of the other ranks."""
        where = f"rank {self.board.rank}, {this_rank.place()}{operation_of(error)}"
        reported = str(error).strip().splitlines()
        try:
            with self.lock:
                failures, first = self.board.failures(), self.board.records()
            second = first
            if not any(not failure.secondary and failure.rank != self.board.rank for failure in failures):
                time.sleep(2.2 * self.interval_s)  # live ranks post again meanwhile
                with self.lock:
                    failures, second = self.board.failures(), self.board.records()
            what, next_step = attribute_failure(self.board.rank, self.board.world, failures, first, second, this_rank.place())
        except (RuntimeError, OSError):
            owner = "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            what = f"a collective failed, and the store with the heartbeats is gone too: {owner} has ended"
            next_step = f"look at what {owner} wrote last"
        return RankLost(what, f"{where}; torch says: {reported[0] if reported else type(error).__name__}"[:600], next_step)


_running: dict[Any, _Liveness] = {}
_starts = 0


def start() -> None:
    """Start posting heartbeats; once per process group, on all ranks."""
    global _starts
    key = dist.group.WORLD
    if key in _running:
        return
    for old in _running.values():
        old.stop(ended=False)
    _running.clear()
    this_rank.failed = ""
    _starts += 1
    prefix = f"hpml/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_starts}"
    try:
        store = compat.side_store(prefix, STORE_TIMEOUT_S)
    except RuntimeError as error:
        log.warning("this rank cannot post heartbeats: the store refused a second connection: %s", error)
        return
    if store is None:
        return
    _running[key] = _Liveness(_StatusStore(store, dist.get_rank(), dist.get_world_size()))
    if _starts == 1:
        atexit.register(_at_exit)
        _watch_uncaught()


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
    return next(iter(_running.values()), None)


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


def name_lost_rank(error: Exception) -> Exception:
    """The error to raise in place of one from a collective: it names the rank that is late or gone. Other errors are
    returned unchanged, and recorded in this rank's status."""
    live = _current()
    if live is None or isinstance(error, RankLost):
        return error
    if not is_distributed(error):
        this_rank.raised = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return error
    lost = live.name(error)
    live.fail(lost, secondary=True)
    return lost


def _watch_uncaught() -> None:
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

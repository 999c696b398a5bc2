"""Heartbeats and failures of all ranks in the store of their process group."""
from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hpml_compiler.runtime.watchdog.attribution import Heartbeat, RankError
from hpml_compiler.runtime.watchdog.rank_status import StallWatch, collective_of_script, line_of_script
from passes import compat

SLOW_S = 3.0  # time in one place after which a heartbeat includes the line of the script


@dataclass
class StatusStore:
    """Heartbeats and failures in the store, over a connection of this thread's own."""

    store: Any
    rank: int
    world: int
    beats: int = 0
    collective: tuple[str, int] = ("", 0)
    """The script's collective at the last post."""

    def post(self, watch: StallWatch, ended: bool = False) -> None:
        status, age = watch.status, watch.age_s()
        self.beats += 1
        before, self.collective = self.collective, collective_of_script() if age > SLOW_S and not status.inside else ("", 0)
        record = Heartbeat(self.beats, str(status.at), status.inside, age, time.time(), ended, status.raised,
                        line_of_script() if age > SLOW_S else "", status.calls, status.meetings, status.meets,
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
def quiet_store() -> Any:
    """Silence the backtrace that the store's client prints once the store is gone; rank 0 may end first."""
    before = compat.set_cpp_log_level(2)
    try:
        yield
    finally:
        if before is not None:
            compat.set_cpp_log_level(before)

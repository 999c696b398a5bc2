"""Members of a run under `hpml run --elastic`: who they are at the moment, and a thread that notices a change at once.

A generation is a set of members. The launcher numbers them and keeps, in its store under PREFIX:

- `members/G`: ids of the members of generation G, in order of their ranks
- `state/ID`: where a member stands: "joins" until it is a member, "forms" while it forms a group and restores state, "steps"
  from the first attempt to the last, "waits" between them, where nothing has a timeout, then "ended"
- `failed/G`, `failed/G/ID`: how many members' collectives have failed, and whose; `all_failed/G`: no member hangs, so that
  nobody is lost
- `endpoints/G/ID`: connections of member ID to others until it has left the generation before G; `ready/G/ID`: it has

Each generation has a store of its own (a prefix, and a connection). Where members fail to form its group although none is lost,
the launcher announces them once more.
"""
from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpml_compiler.elastic.peer_connections import cut_connections, ends_of_connections, own_endpoints
from hpml_compiler.runtime.watchdog.heartbeat import LossNotice
from hpml_compiler.runtime.watchdog.status_store import quiet_store
from passes import compat
from passes.errors import HpmlError

log = logging.getLogger("hpml")
PREFIX = "hpml/elastic"
ID, FIRST, JOINS = "HPML_ELASTIC_ID", "HPML_ELASTIC_GENERATION", "HPML_ELASTIC_JOINS"
WATCH_S = 3600.0  # longest wait for one key of the store
NOTICE_S = 5.0  # the launcher notices within 0.05 s that a process has ended
HUNG_S = 15.0  # after the first failed collective: others that wait fail within that, also on a busy machine


class LauncherLost(HpmlError):
    """The launcher, which says who goes on, is gone."""


class Membership:
    """This process as a member. generation: that its process groups are of; `newest()`: the latest that was announced. joins:
    it was started to join the others, and has no group yet."""

    def __init__(self, own: int, generation: int, joins: bool = False) -> None:
        self.own, self.generation, self.joins = own, generation, joins
        self._newest = self._left = self._cut = generation
        self._told = set[int]()
        others = _ends_at_store()
        self._store = compat.store_below(PREFIX, _connect())
        unwatched = _ends_at_store()
        watched = compat.store_below(PREFIX, _connect())
        self._own_ends = _ends_at_store() - others
        self._watched_ends = self._own_ends - unwatched
        self._thread = threading.Thread(target=self._watch, args=(watched,), name="hpml-members", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread. One that waits while the interpreter ends would abort the process."""
        atexit.unregister(self.close)
        with quiet_store():
            cut_connections(own=self._watched_ends)
            self._thread.join()

    @staticmethod
    def of_launcher() -> Membership | None:
        """This process's membership; None if the launcher is not elastic."""
        if ID not in os.environ:
            return None
        return Membership(int(os.environ[ID]), int(os.environ[FIRST]), os.environ.get(JOINS) == "1")

    def say(self, state: str) -> None:
        self._store.set(f"state/{self.own}", state)

    def newest(self) -> int:
        return self._newest

    @property
    def changed(self) -> bool:
        """True if a newer generation than this process's was announced."""
        return self._newest > self.generation

    def notice(self) -> LossNotice:
        """For waits and collectives of this process."""
        return LossNotice(self.changes_soon, lambda: self.changed)

    def changes_soon(self, failed: bool = True) -> bool:
        """True if a newer generation is announced within the time that the launcher needs to notice. failed: a collective of
        this process has; if those of all members have, but for some that hang, the launcher ends these."""
        until, generation, asked = time.monotonic() + NOTICE_S + HUNG_S * failed, self._newest, 0.0
        if failed and not self.changed and generation not in self._told:
            self._told.add(generation)
            self._store.set(f"failed/{generation}/{self.own}", "yes")
            self._store.add(f"failed/{generation}", 1)
        while not self.changed and time.monotonic() < until:
            if failed and time.monotonic() - asked > 0.1:
                if self._store.check([f"all_failed/{generation}"]):
                    break
                asked = time.monotonic()
            time.sleep(0.01)
        return self.changed

    def members(self, generation: int) -> list[int]:
        """Ids of the members in order of rank."""
        found: list[int] = json.loads(self._store.get(f"members/{generation}"))
        return found

    def store_of(self, generation: int) -> Any:
        """The store for the process groups of a generation, over a connection that is cut when a newer one is announced: no
        rank waits there for an address of one that is lost."""
        return compat.store_below(f"{PREFIX}/world/{generation}", _connect())

    def check_launcher(self) -> None:
        """Raise LauncherLost if nothing will be announced any more."""
        if not self._thread.is_alive():
            raise LauncherLost("the launcher is gone, so no rank can join or leave the run", f"member {self.own}",
                               "start the run again: it resumes from the newest checkpoint")

    def wait_until_ready(self, generation: int) -> bool:
        """Wait until all members have left the generation before; False if a newer one was announced meanwhile. To be called
        when this process has left it. The launcher ends members that do not."""
        pause_s, self._left = 0.001, generation
        keys = [f"ready/{generation}/{member}" for member in self.members(generation)]
        while self._newest == generation:
            if self._cut == generation:
                self._store.set(f"ready/{generation}/{self.own}", "yes")
                if self._store.check(keys):
                    return True
            self.check_launcher()
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
        return False

    def _watch(self, store: Any) -> None:
        """Wait for the next generation, and end all that waits for a member of the one before."""
        try:
            while True:
                try:
                    store.wait([f"members/{self._newest + 1}"], timedelta(seconds=WATCH_S))
                except dist.DistStoreError:
                    continue
                self._newest += 1
                with quiet_store():
                    self._end_waits(store)
        except (RuntimeError, OSError) as error:
            log.debug("the launcher's store is gone: %s", error)

    def _end_waits(self, store: Any) -> None:
        """Cut the connections to all other members and to the store of the generation before, also those that are made
        meanwhile, until the main thread has left it. One side of each is enough, so a member may fail to tell its own."""
        told, pause_s = "", 0.002
        while self.own in (members := json.loads(store.get(f"members/{self._newest}"))):
            left = self._left == self._newest
            if (ends := json.dumps(own_endpoints())) != told:
                store.set(f"endpoints/{self._newest}/{self.own}", told := ends)
            keys = [f"endpoints/{self._newest}/{each}" for each in members if each != self.own]
            peers = {(host, port) for key in keys if store.check([key]) for host, port in json.loads(store.get(key))}
            cut_connections(peers, own=_ends_at_store() - self._own_ends)
            if store.check([f"members/{self._newest + 1}"]):
                self._newest, told = self._newest + 1, ""
            elif left:
                break
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.1)
        self._cut = self._newest


def _connect() -> Any:
    return compat.connect_to_store(os.environ["MASTER_ADDR"], _port())


def _port() -> int:
    return int(os.environ["MASTER_PORT"])


def _ends_at_store() -> set[tuple[str, int]]:
    return ends_of_connections(_port())

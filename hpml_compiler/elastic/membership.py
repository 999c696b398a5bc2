"""Members of a run under `hpml run --elastic`: who they are at the moment, and a thread that notices a change at once.

A generation is a set of members. The launcher numbers them and keeps, in its store under PREFIX:

- `members/G`: ids of the members of generation G, in order of their ranks
- `state/ID`: where a member stands: "joins" until it is a member, "steps" from the first attempt to the last, "waits" between
  them, where nothing has a timeout, then "ended"
- `failed/G`, `failed/G/ID`: how many members' collectives have failed, and whose; `all_failed/G`: no member hangs, so that
  nobody is lost
- `endpoints/G/ID`: the connections that member ID had when generation G began; `ready/G/ID`: it has left the one before
"""
from __future__ import annotations

import json
import logging
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpml_compiler.elastic.peer_connections import cut_connections, own_endpoints
from hpml_compiler.runtime.watchdog.heartbeat import LossNotice
from passes import compat
from passes.errors import HpmlError

log = logging.getLogger("hpml")
PREFIX = "hpml/elastic"
ID, FIRST, JOINS = "HPML_ELASTIC_ID", "HPML_ELASTIC_GENERATION", "HPML_ELASTIC_JOINS"
WATCH_S = 3600.0  # longest wait for one key of the store
LONGEST_S = 600.0  # a member that is not ready by then counts as hung
NOTICE_S = 5.0  # the launcher notices within 0.05 s that a process has ended
HUNG_S = 15.0  # after the first failed collective: others that wait fail within that, also on a busy machine


class MembersHung(HpmlError):
    """A member of the run that is alive does not leave its step."""


class Membership:
    """This process as a member. generation: that its process groups are of; `newest()`: the latest that was announced. joins:
    it was started to join the others, and has no group yet."""

    def __init__(self, own: int, generation: int, joins: bool = False) -> None:
        self.own, self.generation, self.joins = own, generation, joins
        self._newest = self._cut = generation
        self._told = set[int]()
        self._store, watched = _connect(), _connect()
        self._thread = threading.Thread(target=self._watch, args=(watched,), name="hpml-members", daemon=True)
        self._thread.start()

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
        """The store for the process groups of a generation."""
        return compat.store_below(f"world/{generation}", self._store)

    def wait_until_ready(self, generation: int) -> bool:
        """Wait until all members have left the generation before; False if a newer one was announced meanwhile. To be called
        when this process has left it."""
        begun, pause_s = time.monotonic(), 0.001
        keys = {member: f"ready/{generation}/{member}" for member in self.members(generation)}
        while self._cut < generation:
            time.sleep(0.001)
        self._store.set(f"ready/{generation}/{self.own}", "yes")
        while self._newest == generation:
            if self._store.check([*keys.values()]):
                return True
            if time.monotonic() - begun > LONGEST_S:
                late = [str(member) for member, key in keys.items() if not self._store.check([key])]
                raise MembersHung(f"{len(late)} of {len(keys)} ranks did not leave their step in {LONGEST_S:.0f} s",
                                  f"members {', '.join(late)}", "look at their stacks with py-spy, and end them")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
        return False

    def _watch(self, store: Any) -> None:
        """Wait for the next generation, and end collectives that wait for a member of the one before."""
        try:
            while True:
                try:
                    store.wait([f"members/{self._newest + 1}"], timedelta(seconds=WATCH_S))
                except dist.DistStoreError:
                    continue
                self._newest += 1
                self._leave(store, self._newest)
                self._cut = self._newest
        except (RuntimeError, OSError) as error:
            log.debug("the launcher's store is gone: %s", error)

    def _leave(self, store: Any, generation: int) -> None:
        """Cut the connections to all others. One side of each is enough, so a member may fail to tell its own."""
        members = json.loads(store.get(f"members/{generation}"))
        if self.own not in members:
            return
        store.set(f"endpoints/{generation}/{self.own}", json.dumps(own_endpoints()))
        others = {f"endpoints/{generation}/{each}" for each in members if each != self.own}
        until = time.monotonic() + NOTICE_S
        while others and time.monotonic() < until:
            for key in [key for key in others if store.check([key])]:
                others.discard(key)
                cut_connections({(host, port) for host, port in json.loads(store.get(key))})
            time.sleep(0.002)


def _connect() -> Any:
    return compat.store_below(PREFIX, compat.connect_to_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))

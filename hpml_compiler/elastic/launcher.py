"""Launcher of `hpml run --elastic`: starts the ranks of one node, and lets the others go on when one is lost.

torchrun's agent ends all ranks when one has failed. This one announces the members that are left in its store (see
`membership`), and may start another process in the place of a lost one. A rank that hangs is ended: one that is in a step, and
whose collectives have not failed with those of the others, or that does not leave its step. Ranks that fail to form a group
although none is lost are announced again. All ranks are restarted where one is lost while another is not in its steps.
"""
from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hpml_compiler.elastic.membership import FIRST, HUNG_S, ID, JOINS, PREFIX
from passes import compat
from passes.errors import BadInput

log = logging.getLogger("hpml")
POLL_S = 0.02
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
FAILED_S = 0.5  # from a failure to form a group to the next try: a rank that is lost is noticed within that
TRIES = 5  # to form a group of the same ranks
SILENT_S, LONGEST_S = 60.0, 600.0  # for a rank's thread to notice that ranks are announced, and for the rank to leave its step
TOGETHER = {"steps", "waits", "forms", "joins"}


def run_elastic(command: Sequence[str], ranks: int, restarts: int, replace: bool, stop_s: float, alone: bool) -> int:
    """Run the ranks of this node so that they survive the loss of others; returns the exit code. alone: it is the only node."""
    if not alone:
        raise BadInput("ranks survive the loss of others on one node alone", where="--elastic",
                       next_step="leave --elastic out: --nnodes MIN:MAX restarts all ranks with the nodes that are left")
    if torch.cuda.is_available():
        raise BadInput("process groups of NCCL are not formed anew in process yet", where="--elastic",
                       next_step="use --max-restarts, or hide the GPUs: CUDA_VISIBLE_DEVICES=")
    return ElasticLauncher(command, ranks, restarts, replace, stop_s).run()


@dataclass
class MemberProcess:
    """One process of the run. number: id among all that were started."""

    number: int
    process: subprocess.Popen[bytes]
    error_file: Path
    hung: str = ""

    def end_hung(self, why: str) -> None:
        self.hung = why
        self.process.kill()
        self.process.wait()

    def ending(self) -> str:
        code, word = self.process.returncode, {}
        if self.hung:
            return f"hung: {self.hung}; its process was ended"
        if self.error_file.is_file():
            word = json.loads(self.error_file.read_text() or "{}")
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return how + (f": {word['message']}" if word.get("message") else "")


@dataclass
class Generation:
    """A set of ranks that were announced. tries: to form a group of them. settled: all have left the group of before."""

    number: int
    members: list[int]
    tries: int = 1
    since: float = field(default_factory=time.monotonic)
    settled: bool = False
    failed_at: float = 0.0  # -1.0: decided what to do about it


class ElasticLauncher:
    """Starts and watches the ranks. command: of each rank. restarts: ranks that may be lost; each restart of all counts as one.
    replace: start another process for each rank that is lost. stop_s: time that ranks have to end after a signal."""

    def __init__(self, command: Sequence[str], ranks: int, restarts: int, replace: bool, stop_s: float = 30.0) -> None:
        self._command, self._ranks, self._restarts, self._replace, self._stop_s = [*command], ranks, restarts, replace, stop_s
        self._server: Any = None
        self._started = 0
        self._generation = Generation(0, [])
        self._members: list[MemberProcess] = []
        self._joining: list[MemberProcess] = []
        self._received = 0

    def run(self) -> int:
        """Run until all ranks have ended; returns the exit code: of the rank whose loss ended the run, 128 + N for signal N."""
        before = {getattr(signal, name): signal.signal(getattr(signal, name), self._note) for name in SIGNALS}
        try:
            with tempfile.TemporaryDirectory(prefix="hpml_elastic_") as folder:
                return self._run(Path(folder))
        finally:
            self._end_all(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def _run(self, folder: Path) -> int:
        self._start_all(folder)
        while self._members:
            time.sleep(POLL_S)
            if self._received:
                self._end_all(self._received)
                return 128 + self._received
            self._members = [each for each in self._members if each.process.poll() != 0]
            self._joining = [each for each in self._joining if self._is_wanted(each)]
            self._settle(folder)
            lost = [each for each in self._members if each.process.poll() is not None]
            if lost and (code := self._lost(lost, folder)):
                return code
            arrived = [each for each in self._joining if self._state(each) == "joins"]
            if arrived and all(self._state(each) in TOGETHER for each in self._members):
                self._joining = [each for each in self._joining if each not in arrived]
                log.warning("%d more ranks join", len(arrived))
                self._announce([*self._members, *arrived])
        self._end_all(signal.SIGTERM)
        return 0

    def _is_wanted(self, joining: MemberProcess) -> bool:
        if joining.process.poll() is None:
            return True
        log.warning("process %d, which was to join, %s", joining.number, joining.ending())
        return False

    def _lost(self, lost: Sequence[MemberProcess], folder: Path) -> int:
        """Let the others go on without these ranks; returns the exit code of the run if that is not possible."""
        left = [each for each in self._members if each not in lost]
        places = ", ".join(f"rank {self._members.index(each)} {each.ending()}" for each in lost)
        code = lost[0].process.returncode
        if self._restarts < 1:
            log.error("%s; no restart is left", places)
            self._end_all(signal.SIGTERM)
            return code if code > 0 else 128 - code
        states = {self._state(each) for each in left}
        if states <= {"joins"} or not states <= TOGETHER:
            self._restart(places, folder)
            return 0
        self._restarts -= len(lost)
        log.error("%s; the other %d go on", places, len(left))
        self._announce(left)
        for _ in lost if self._replace else ():
            self._joining.append(self._start(folder, 0, 1, joins=True))
        return 0

    def _restart(self, why: str, folder: Path) -> None:
        log.error("%s; all ranks are restarted", why)
        self._restarts -= 1
        self._end_all(signal.SIGTERM)
        self._start_all(folder)

    def _start_all(self, folder: Path) -> None:
        self._server = compat.loopback_store()  # process groups of ranks that were ended leave their addresses in a store
        self._store: Any = compat.store_below(PREFIX, self._server)
        self._generation = Generation(self._generation.number + 1, [], settled=True)
        self._members = [self._start(folder, rank, self._ranks) for rank in range(self._ranks)]

    def _announce(self, members: list[MemberProcess], tries: int = 1) -> None:
        self._members = members
        self._generation = Generation(self._generation.number + 1, [each.number for each in members], tries)
        self._store.set(f"members/{self._generation.number}", json.dumps(self._generation.members))

    def _start(self, folder: Path, rank: int, ranks: int, joins: bool = False) -> MemberProcess:
        number, self._started = self._started, self._started + 1
        error_file = folder / f"error{number}.json"
        process = self._process({
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(self._generation.number),
            "TORCHELASTIC_ERROR_FILE": str(error_file), "PYTHONUNBUFFERED": "1",
            ID: str(number), FIRST: str(self._generation.number), JOINS: str(int(joins))})
        return MemberProcess(number, process, error_file)

    def _process(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, env={**os.environ, **environment})

    def _settle(self, folder: Path) -> None:
        """See to ranks that do not come together, none being lost."""
        now, generation = time.monotonic(), self._generation
        if not generation.settled:
            absent = self._without(f"ready/{generation.number}", generation.members)
            generation.settled = not absent
            if set(absent) - {each.number for each in self._members}:  # it ended the run while the others were announced
                if all(self._state(each) == "joins" for each in self._members):
                    self._end_all(signal.SIGTERM)
                else:
                    self._announce(self._members, generation.tries)
            elif now - generation.since > SILENT_S:
                silent = self._without(f"endpoints/{generation.number}", absent)
                self._end_hung(absent if now - generation.since > LONGEST_S else silent, "it did not leave its step")
        failed = f"failed/{generation.number}"
        if generation.failed_at < 0.0 or not self._store.add(failed, 0):
            return
        generation.failed_at = generation.failed_at or now
        still = self._without(failed, [each.number for each in self._members])
        forms = any(self._state(each) == "forms" for each in self._members if each.number not in still)
        if still and now - generation.failed_at < (FAILED_S if forms else HUNG_S):
            return
        generation.failed_at = -1.0
        if forms and generation.tries >= TRIES and self._restarts:
            self._restart(f"{len(self._members)} ranks did not form a group in {TRIES} tries", folder)
            return
        if forms and generation.tries < TRIES:
            self._announce(self._members, generation.tries + 1)
            return
        hung = [each.number for each in self._members if each.number in still and self._state(each) == "steps"]
        if not self._end_hung(hung, f"its collectives did not fail within {HUNG_S:.0f} s of those of the others"):
            self._store.set(f"all_failed/{generation.number}", "yes")

    def _without(self, key: str, numbers: Sequence[int]) -> list[int]:
        """Members that have not set their key."""
        return [each for each in numbers if not self._store.check([f"{key}/{each}"])]

    def _end_hung(self, numbers: Sequence[int], why: str) -> bool:
        """End these members; True if there are any."""
        for each in self._members:
            if each.number in numbers:
                each.end_hung(why)
        return bool(numbers)

    def _state(self, member: MemberProcess) -> str:
        key = f"state/{member.number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _end_all(self, number: int) -> None:
        """Send a signal to all ranks, and end those that are still there after `stop_s`."""
        running = [each.process for each in (*self._members, *self._joining) if each.process.poll() is None]
        for process in running:
            process.send_signal(number)
        until = time.monotonic() + self._stop_s
        for process in running:
            try:
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._members, self._joining = [], []

"""Ranks that fail outside of a step -> all are restarted, or the run ends with the code of the first; signals reach all."""
from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpml_compiler.elastic import launcher
from hpml_compiler.elastic.launcher import ElasticLauncher

FAILS_ONCE = """
import os, pathlib, sys
here = pathlib.Path(sys.argv[1])
(here / (os.environ["HPML_ELASTIC_ID"] + " " + os.environ["MASTER_PORT"])).touch()
sys.exit(3 if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] <= sys.argv[2] else 0)
"""
SLEEPS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1], "ended" + os.environ["RANK"]).touch(), sys.exit(75)))
pathlib.Path(sys.argv[1], "began" + os.environ["RANK"]).touch()
time.sleep(60)
"""


def _launcher(source: str, *arguments: str, restarts: int = 1) -> ElasticLauncher:
    return ElasticLauncher([sys.executable, "-c", source, *arguments], 2, restarts, replace=False, stop_s=5)


def test_all_are_restarted_with_another_store(tmp_path: Path) -> None:
    assert _launcher(FAILS_ONCE, str(tmp_path), "1").run() == 0
    names = sorted(each.name.split() for each in tmp_path.iterdir())
    assert {member for member, _ in names} >= {"1", "2", "3"} and len({port for _, port in names}) == 2


def test_no_restart_is_left(tmp_path: Path) -> None:
    assert _launcher(FAILS_ONCE, str(tmp_path), "9").run() == 3


def test_signal_reaches_all(tmp_path: Path) -> None:
    def send() -> None:
        while len([*tmp_path.iterdir()]) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert _launcher(SLEEPS, str(tmp_path)).run() == 128 + signal.SIGTERM
    assert {each.name for each in tmp_path.iterdir()} >= {"ended0", "ended1"}


def _announced(folder: Path, monkeypatch: pytest.MonkeyPatch, states: Sequence[str]) -> ElasticLauncher:
    """Two ranks, in these states, that were announced."""
    monkeypatch.setattr(launcher, "FAILED_S", 0.0)
    made = _launcher(SLEEPS, str(folder))
    made._start_all(folder)
    made._announce(made._members)
    for member, state in zip(made._members, states, strict=True):
        made._store.set(f"state/{member.number}", state)
    return made


def test_ranks_that_form_no_group_are_announced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most TRIES times; then all are restarted."""
    made = _announced(tmp_path, monkeypatch, ("forms", "forms"))
    before = [each.process.pid for each in made._members]
    for tries in range(1, launcher.TRIES + 1):
        number = made._generation.number
        assert made._generation.tries == tries and [each.process.pid for each in made._members] == before
        for member in made._members:
            made._store.set(f"ready/{number}/{member.number}", "yes")
        made._store.set(f"failed/{number}/0", "yes")
        made._store.add(f"failed/{number}", 1)
        made._settle(tmp_path)
        assert made._generation.number == number + 1
    assert made._restarts == 0 and not {each.process.pid for each in made._members} & {*before}
    made._end_all(signal.SIGKILL)


def test_a_rank_ends_the_run_while_all_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other is announced without it, or ended where it has not been a member yet."""
    for state, left in (("steps", 1), ("joins", 0)):
        made = _announced(tmp_path, monkeypatch, ("ended", state))
        over, other = made._members
        made._members = [other]  # as after exit code 0
        made._settle(tmp_path)
        assert made._members == [other][:left]
        assert made._generation.members == ([other.number] if left else [over.number, other.number])
        for each in (over, other):
            each.end_hung("the test is over")

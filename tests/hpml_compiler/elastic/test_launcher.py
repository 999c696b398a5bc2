"""Ranks that fail outside of a step -> all are restarted, or the run ends with the code of the first; signals reach all."""
from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

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

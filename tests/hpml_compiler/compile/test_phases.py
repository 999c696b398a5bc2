"""The time before the first step: what is inside of a phase is not the outer one's, and a terminal sees the innermost."""
from __future__ import annotations

import io
import time

import pytest

from hpml_compiler.compile import phases
from hpml_compiler.compile.phases import phase


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_an_inner_phase_takes_is_its_own(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 3.5, 4.5, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    seconds: dict[str, float] = {}
    with phase("trace", "tracing", seconds):
        with phase("solve", "solving", seconds):
            pass
        with phase("solve", "solving", seconds):
            pass
    assert seconds == {"solve": 2.0 + 1.0, "trace": 10.0 - 3.0}


def test_a_terminal_is_told_what_is_being_done_and_is_left_clean(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with phase("trace", "graph_0: tracing", {}), phase("solve", "graph_0: planning", {}):
        pass
    said = terminal.getvalue().split("\r\x1b[K")
    assert said == ["", "hpml: graph_0: tracing ...", "hpml: graph_0: planning ...", "hpml: graph_0: tracing ...", ""]


def test_what_is_no_terminal_is_told_nothing(capsys):
    with phase("trace", "tracing", {}):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_failure_ends_its_phases(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with pytest.raises(ValueError), phase("trace", "tracing", {}), phase("solve", "solving", {}):
        raise ValueError
    assert not phases._open

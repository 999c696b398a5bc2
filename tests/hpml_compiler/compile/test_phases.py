"""The time before the first step: what is inside of a phase is not the outer one's, and a terminal sees the innermost."""
from __future__ import annotations

import io
import time

import pytest
import torch
from torch import nn

from hpml_compiler.compile import phases
from hpml_compiler.compile.phases import phase
from tests.hpml_compiler.compile.test_blocks import Layer


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


def test_a_terminal_is_told_how_far_it_has_come(monkeypatch):
    """Of layers, what differs is compiled: two ends and one in the middle."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(0.0) for _ in range(8)))
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "compile_blocks": "on", "microbatches": 2})
    with phase("compile forward", "graph_0: compiling forward", {}):
        call(torch.ones(4, 16)).sum().backward()
    said = [line for line in terminal.getvalue().split("\r\x1b[K") if "block" in line]
    ends = [line.removeprefix("hpml: graph_0: compiling forward, block ") for line in said]
    assert ends and ends[0].startswith("1 of ")
    for line in ends:
        number, total = map(int, line.removesuffix(" ...").split(" of "))
        assert 1 <= number <= total


def test_what_is_no_terminal_is_told_nothing(capsys):
    with phase("trace", "tracing", {}):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_failure_ends_its_phases(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with pytest.raises(ValueError), phase("trace", "tracing", {}), phase("solve", "solving", {}):
        raise ValueError
    assert not phases._open

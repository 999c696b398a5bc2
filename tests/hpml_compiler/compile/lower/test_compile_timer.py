"""Time before the first step: nested phases are counted once, and a terminal shows the innermost."""
from __future__ import annotations

import io
import sys
import time

import pytest
import torch
from torch import nn

from hpml_compiler.compile.lower import compile_timer
from hpml_compiler.compile.lower.compile_timer import compile_phase, part
from hpml_compiler.session import session
from passes.session_state import state_of
from tests.hpml_compiler.compile.lower.test_regional_compile import Layer
from tests.hpml_compiler.compile.test_pipeline_parallel import Tied, batch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_an_inner_phase_takes_is_its_own(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 3.5, 4.5, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    seconds: dict[str, float] = {}
    with compile_phase("trace", "tracing", seconds):
        with compile_phase("solve", "solving", seconds):
            pass
        with compile_phase("solve", "solving", seconds):
            pass
    assert seconds == {"solve": 2.0 + 1.0, "trace": 10.0 - 3.0}


def test_a_terminal_is_told_what_is_being_done_and_is_left_clean(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with compile_phase("trace", "graph_0: tracing", {}), compile_phase("solve", "graph_0: planning", {}):
        pass
    said = terminal.getvalue().split("\r\x1b[K")
    assert said == ["", "hpml: graph_0: tracing ...", "hpml: graph_0: planning ...", "hpml: graph_0: tracing ...", ""]


def test_a_terminal_is_told_how_far_it_has_come(monkeypatch):
    """Of layers, what differs is compiled: two ends and one in the middle."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    session.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(0.0) for _ in range(8)))
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "compile_blocks": "on", "microbatches": 2})
    call(torch.ones(4, 16)).sum().backward()
    for half in ("forward", "backward"):
        begins = f"graph_0: compiling {half}, block "
        ends = [line.removeprefix(begins) for line in told(terminal) if line.startswith(begins)]
        assert ends and ends[0].startswith("1 of ")
        for line in ends:
            number, total = map(int, line.split(" of "))
            assert 1 <= number <= total


def test_what_is_no_terminal_is_told_nothing(capsys):
    with compile_phase("trace", "tracing", {}):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_failure_ends_its_phases(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with pytest.raises(ValueError), compile_phase("trace", "tracing", {}), compile_phase("solve", "solving", {}):
        raise ValueError
    assert not state_of(compile_timer._OpenPhases)


def test_a_part_is_of_the_graph_that_it_is_inside_of(monkeypatch):
    terminal, seconds = Terminal(), {}
    monkeypatch.setattr("sys.stderr", terminal)
    with compile_phase("trace", "graph_0: tracing", seconds), part("compile forward", "compiling stage 1 forward"):
        pass
    with part("compile backward", "compiling backward"):
        pass
    around = "graph_0: tracing"
    assert told(terminal) == [around, "graph_0: compiling stage 1 forward", around, "compiling backward"]
    assert seconds.keys() == {"trace", "compile forward"}


def told(terminal: Terminal) -> list[str]:
    return [line.removeprefix("hpml: ").removesuffix(" ...") for line in terminal.getvalue().split("\r\x1b[K") if line]


HALVES = ["compiling forward", "compiling backward"]
STEPS = ["tracing", "annotating", "planning microbatches", "rewriting"]


@pytest.mark.parametrize(("options", "steps"), [
    ({"microbatches": 2}, STEPS + HALVES), ({"compile_blocks": "on"}, ["tracing", "rewriting", *HALVES])])
def test_one_device_says_what_it_does(monkeypatch, options, steps):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    session.reset()
    torch.manual_seed(0)
    call = torch.compile(nn.Linear(16, 1), backend="hpml", options={"compiler": "eager", **options})
    call(torch.ones(4, 16)).sum().backward()
    assert [line for line in dict.fromkeys(told(terminal)) if "," not in line] == [f"graph_0: {step}" for step in steps]
    if "microbatches" in options:
        assert "graph_0: compiling forward, what is around its loop" in told(terminal)
        seconds = session.last_plan().seconds
        assert set(seconds) == {"trace", "annotate", "solve", "rewrite", "compile forward", "compile backward"}
        assert min(seconds.values()) > 0


def in_stages(rank, options):
    sys.stderr = terminal = Terminal()
    call = torch.compile(Tied(0.0), backend="hpml", options=options)
    try:
        call(*batch())[0].backward()
    finally:
        sys.stderr = sys.__stderr__
    return told(terminal), session.last_plan().seconds


def test_ranks_of_a_pipeline_say_which_stage_they_compile(launch):
    options = {"compiler": "eager", "mesh": {"pp": 2}, "microbatches": 4}
    (said, seconds), (nothing, others) = launch(in_stages, 2, (options,))
    name = "graph_0: "
    assert all(line.startswith(name) for line in said) and not nothing
    steps = [*STEPS[:-1], "checking that the stages fit in memory", "rewriting", "cutting into stages", *HALVES[:1],
             "compiling stage 0 forward", "compiling stage 0 backward"]
    assert [line for line in dict.fromkeys(line.removeprefix(name) for line in said) if "," not in line] == steps
    for each in (seconds, others):
        assert set(each) == {"trace", "annotate", "solve", "rewrite", "compile forward", "compile backward"}
        assert min(each.values()) > 0

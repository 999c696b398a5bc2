"""The manager checks a whole sequence before anything runs."""
from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import fx

from passes import registry
from passes.annotations import Key, has, write
from passes.base import AnalysisPass, PassError, TransformPass
from passes.manager import PassManager

A, B = Key("a", int, scope="graph"), Key("b", int, scope="graph")


@dataclass(frozen=True)
class MakeA(AnalysisPass):
    name = "make_a"
    provides = (A,)

    def run(self, graph_module):
        write(A, graph_module, 1)


@dataclass(frozen=True)
class MakeB(AnalysisPass):
    name = "make_b"
    requires = (A,)
    provides = (B,)

    def run(self, graph_module):
        write(B, graph_module, 2)


@dataclass(frozen=True)
class ToAbs(TransformPass):
    """neg -> abs"""

    name = "to_abs"
    preserves = (B,)

    def run(self, graph_module):
        nodes = [node for node in graph_module.graph.nodes if node.target is torch.neg]
        for node in nodes:
            node.target = torch.abs
        return bool(nodes)


@dataclass(frozen=True)
class UseA(TransformPass):
    name = "use_a"
    requires = (A,)

    def run(self, graph_module):
        return False


@pytest.fixture
def graph_module() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: torch.neg(x))


@pytest.fixture
def registered():
    registry.names()  # everything the project has, so that only the test's own pass is taken back
    with registry.PASSES.temporary():
        registry.register(MakeA)
        yield


def test_passes_run_in_order_and_return_their_results(graph_module):
    results = PassManager([MakeA(), MakeB(), ToAbs()])(graph_module)
    assert [(result.pass_name, result.modified) for result in results] == [
        ("make_a", False), ("make_b", False), ("to_abs", True)]
    assert torch.equal(graph_module(torch.tensor(-1.0)), torch.tensor(1.0))
    assert has(B, graph_module) and not has(A, graph_module)


def test_nothing_runs_when_a_requirement_cannot_be_met(graph_module, registered):
    with pytest.raises(PassError, match=r"(?s)nothing was run.*to_abs -> make_b.*2. make_b requires 'a': put 'make_a'"):
        PassManager([ToAbs(), MakeB()])(graph_module)
    assert "neg" in graph_module.code


def test_a_provider_that_comes_too_late_is_named():
    with pytest.raises(PassError, match="1. make_b requires 'a': 'make_a' provides it but comes later; move it before"):
        PassManager([MakeB(), MakeA()]).check()


def test_a_transform_that_loses_an_annotation_is_named(registered):
    with pytest.raises(PassError, match="3. use_a requires 'a': transform 'to_abs' does not preserve it; run 'make_a'"):
        PassManager([MakeA(), ToAbs(), UseA()]).check()
    PassManager([MakeA(), ToAbs(), MakeA(), UseA()]).check()


def test_an_annotation_that_nobody_provides_is_said_so():
    with pytest.raises(PassError, match="1. make_b requires 'a': no registered pass provides it"):
        PassManager([MakeB()]).check()


def test_all_problems_are_listed_at_once():
    with pytest.raises(PassError, match="(?s)1. make_b requires 'a'.*2. use_a requires 'a'"):
        PassManager([MakeB(), UseA()]).check()


def test_what_is_on_the_graph_already_counts(graph_module):
    MakeA()(graph_module)
    PassManager([MakeB()])(graph_module)
    assert has(B, graph_module)


@dataclass(frozen=True)
class Breaks(AnalysisPass):
    name = "breaks"
    error: Exception | None = None

    def run(self, graph_module):
        if self.error is not None:
            raise self.error
        return "a result"


@pytest.mark.parametrize(("passes", "before"), [((MakeA(), MakeB()), "make_a -> make_b"), ((), "nothing")])
def test_the_error_of_a_failing_pass_names_the_passes_before_it(graph_module, passes, before):
    with pytest.raises(PassError, match=f"(?s)'breaks' returned str.*where: Breaks.run; before 'breaks' ran {before}\n"):
        PassManager([*passes, Breaks()])(graph_module)
    with pytest.raises(KeyError) as caught:
        PassManager([*passes, Breaks(KeyError("x"))])(graph_module)
    assert caught.value.__notes__ == [f"in pass 'breaks'; before it ran {before}"]


def test_summaries_are_logged_and_diffs_in_debug(graph_module, caplog):
    with caplog.at_level(logging.INFO, logger="hpml"):
        PassManager([MakeA()])(graph_module)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["make_a: wrote a (1)"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="hpml"):
        PassManager([ToAbs()])(graph_module)
    assert "+neg = torch.abs(x)" in caplog.records[1].getMessage()


@pytest.mark.parametrize(("entry", "step"), [(MakeA, r"write MakeA\(\)"), ("make_a", "pass instances of Pass")])
def test_a_sequence_holds_instances(entry, step):
    with pytest.raises(PassError, match=f"(?s)is not a pass.*position 2 .*{step}"):
        PassManager([MakeA(), entry])


def test_passes_are_ranges_in_a_profile():
    graph_module = fx.symbolic_trace(lambda x: torch.neg(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        PassManager((MakeA(), MakeB()))(graph_module)
    names = [event.name for event in profiled.events()]
    assert [name for name in names if name.startswith("hpml")] == ["hpml pass make_a", "hpml pass make_b"]

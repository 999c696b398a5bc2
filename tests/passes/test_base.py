"""The lifecycle of a pass: requirements and declarations are checked."""
from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass

import pytest
import torch
from torch import fx

from passes.analyses.shapes import SHAPES
from passes.annotations import Key, has, read, write
from passes.base import AnalysisPass, PassError, TransformPass
from tests.passes.traced import joint_graph

USERS = Key("users", int)
ORDER = Key("order", tuple[str, ...], scope="graph")


def _calls(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True)
class CountUsers(AnalysisPass):
    name = "count_users"
    provides = (USERS,)

    def run(self, graph_module):
        for node in _calls(graph_module):
            write(USERS, node, len(node.users))


@dataclass(frozen=True)
class Order(AnalysisPass):
    name = "order"
    requires = (USERS,)
    provides = (ORDER,)

    def run(self, graph_module):
        write(ORDER, graph_module, tuple(node.name for node in _calls(graph_module)))


@dataclass(frozen=True)
class DropDoubleNeg(TransformPass):
    """neg(neg(x)) -> x"""

    name = "drop_double_neg"
    preserves = (USERS,)

    def run(self, graph_module):
        modified = False
        for node in _calls(graph_module):
            inner = node.args[0]
            if node.target is torch.neg and isinstance(inner, fx.Node) and inner.target is torch.neg:
                node.replace_all_uses_with(inner.args[0])
                graph_module.graph.erase_node(node)
                modified = True
        graph_module.graph.eliminate_dead_code()
        return modified


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.ones(2))

    def forward(self, x):
        return torch.neg(torch.neg(x)) + self.bias


@pytest.fixture
def graph_module() -> fx.GraphModule:
    return fx.symbolic_trace(Model())


def test_analysis_writes_what_it_provides(graph_module):
    result = CountUsers()(graph_module)
    assert [read(USERS, node) for node in _calls(graph_module)] == [1, 1, 1]
    assert (result.modified, result.added, result.removed, result.annotated) == (False, (), (), (("users", 3),))
    assert result.summary().startswith("count_users: wrote users (3), ")
    assert "+neg = torch.neg(x)  # users=1" in result.diff().splitlines()


def test_transform_before_and_after(graph_module):
    before = graph_module(torch.tensor([1.0, -2.0]))
    result = DropDoubleNeg()(graph_module)
    assert torch.equal(graph_module(torch.tensor([1.0, -2.0])), before)
    assert "neg" not in graph_module.code  # recompiled
    assert (result.modified, result.nodes_before, result.nodes_after) == (True, 6, 4)
    assert (result.added, result.removed) == ((), ("neg", "neg_1"))
    assert result.summary().startswith("drop_double_neg: modified, 6 -> 4 nodes (+0 -2), ")
    changed = [line for line in result.diff().splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == [
        "-neg = torch.neg(x)",
        "-neg_1 = torch.neg(neg)",
        "-add = operator.add(neg_1, bias)",
        "+add = operator.add(x, bias)",
    ]


def test_transform_that_finds_nothing_changes_nothing(graph_module):
    DropDoubleNeg()(graph_module)
    CountUsers()(graph_module)
    Order()(graph_module)
    result = DropDoubleNeg()(graph_module)
    assert not result.modified
    assert has(ORDER, graph_module)  # not preserved, but there was no change
    assert result.diff() == ""
    assert result.summary().startswith("drop_double_neg: unmodified, 4 nodes, ")


def test_a_diff_shows_its_own_pass_even_after_later_ones(graph_module):
    result = DropDoubleNeg()(graph_module)
    early = result.diff()
    _insert_relu(graph_module)
    _calls(graph_module)[0].target = operator.sub
    assert result.diff() == early


def test_what_is_not_preserved_is_dropped(graph_module):
    CountUsers()(graph_module)
    Order()(graph_module)
    DropDoubleNeg()(graph_module)
    assert has(USERS, graph_module)
    assert not has(ORDER, graph_module)


def test_a_missing_requirement_names_nodes_and_provider(graph_module):
    with pytest.raises(PassError, match=r"(?s)'order' requires 'users'.*3 nodes without it: neg, neg_1, add"):
        Order()(graph_module)

    @dataclass(frozen=True)
    class NeedsShapes(AnalysisPass):
        requires = (SHAPES,)

        def run(self, graph_module):
            pass

    with pytest.raises(PassError, match=r"(?s)'NeedsShapes' requires 'shapes'.*next step: run 'shapes' first"):
        NeedsShapes()(graph_module)


def _insert_relu(graph_module):
    node = _calls(graph_module)[0]
    with graph_module.graph.inserting_before(node):
        graph_module.graph.call_function(torch.relu, (node.args[0],))


def _change_target(graph_module):
    _calls(graph_module)[0].target = torch.abs


def _change_argument(graph_module):
    _calls(graph_module)[-1].update_arg(1, 2.0)


def _change_keyword(graph_module):
    _calls(graph_module)[0].update_kwarg("out", None)


def _rename(graph_module):
    _calls(graph_module)[0].name = "renamed"


def _replace_buffer(graph_module):
    graph_module.bias = torch.zeros(2)


def _erase_output(graph_module):
    graph_module.graph.erase_node(graph_module.graph.output_node())


def _move(graph_module):
    first = _calls(graph_module)[0]
    bias = next(node for node in graph_module.graph.nodes if node.op == "get_attr")
    first.prepend(bias)


def _rebuild(graph_module):
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    graph_module.graph = graph


CHANGES = [
    _insert_relu, _change_target, _change_argument, _change_keyword, _rename, _replace_buffer, _erase_output, _move,
    _rebuild,
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_analysis_must_not_change_the_graph(graph_module, change):
    @dataclass(frozen=True)
    class Meddler(AnalysisPass):
        def run(self, graph_module):
            change(graph_module)

    with pytest.raises(PassError, match="analysis 'Meddler' changed the graph"):
        Meddler()(graph_module)


@pytest.mark.parametrize("change", CHANGES)
def test_a_transform_must_admit_a_change(graph_module, change):
    @dataclass(frozen=True)
    class Denier(TransformPass):
        def run(self, graph_module):
            change(graph_module)
            return False

    with pytest.raises(PassError, match="transform 'Denier' changed the graph and returned False"):
        Denier()(graph_module)


def test_a_change_inside_a_subgraph_is_seen(graph_module):
    class Outer(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    class KeepInner(fx.Tracer):
        def is_leaf_module(self, module, name):
            return name == "inner"

    outer = Outer(graph_module)
    traced = fx.GraphModule(outer, KeepInner().trace(outer))

    @dataclass(frozen=True)
    class Meddler(AnalysisPass):
        def run(self, graph_module):
            _change_target(graph_module.inner)

    with pytest.raises(PassError, match=r"(?s)changed the graph.*`neg = torch.neg\(x\)` became `neg = torch.abs\(x\)`"):
        Meddler()(traced)


def test_assigning_equal_arguments_is_no_change(graph_module):
    @dataclass(frozen=True)
    class Touch(AnalysisPass):
        def run(self, graph_module):
            for node in _calls(graph_module):
                node.args = tuple(node.args)
                node.kwargs = dict(node.kwargs)

    assert not Touch()(graph_module).modified


def test_an_analysis_must_provide_what_it_promised_everywhere(graph_module):
    @dataclass(frozen=True)
    class Lazy(AnalysisPass):
        provides = (USERS, ORDER)

        def run(self, graph_module):
            for node in _calls(graph_module)[:-1]:
                write(USERS, node, 0)

    with pytest.raises(PassError, match=r"(?s)'Lazy' did not provide 'users'.*1 nodes without it: add"):
        Lazy()(graph_module)


def test_an_analysis_must_not_write_other_keys(graph_module):
    CountUsers()(graph_module)

    @dataclass(frozen=True)
    class Busybody(AnalysisPass):
        def run(self, graph_module):
            write(USERS, _calls(graph_module)[0], 1000)

    with pytest.raises(PassError, match="'Busybody' wrote or removed 'users', which it does not provide"):
        Busybody()(graph_module)


def test_a_transform_must_keep_what_it_preserves(graph_module):
    CountUsers()(graph_module)

    @dataclass(frozen=True)
    class Forgetful(TransformPass):
        preserves = (USERS,)

        def run(self, graph_module):
            _insert_relu(graph_module)
            return True

    with pytest.raises(PassError, match=r"(?s)'Forgetful' did not preserve 'users'.*1 nodes without it: relu"):
        Forgetful()(graph_module)


def test_a_transform_must_leave_a_graph_that_runs(graph_module):
    @dataclass(frozen=True)
    class Scrambler(TransformPass):
        def run(self, graph_module):
            first, *_, last = _calls(graph_module)
            last.append(first)
            return True

    with pytest.raises(PassError, match="transform 'Scrambler' left a graph that is not well formed"):
        Scrambler()(graph_module)


@pytest.mark.parametrize("returned", [None, 0, "yes"])
def test_a_transform_must_return_a_bool(graph_module, returned):
    @dataclass(frozen=True)
    class Vague(TransformPass):
        def run(self, graph_module):
            return returned

    with pytest.raises(PassError, match="(?s)transform 'Vague' returned .*return True if it changed"):
        Vague()(graph_module)


def test_an_analysis_must_return_nothing(graph_module):
    @dataclass(frozen=True)
    class Chatty(AnalysisPass):
        def run(self, graph_module):
            return True

    with pytest.raises(PassError, match="analysis 'Chatty' returned bool"):
        Chatty()(graph_module)


@pytest.mark.parametrize("attribute", ["requires", "provides"])
def test_bare_strings_are_no_keys(attribute):
    with pytest.raises(PassError, match=f"`{attribute}` must be a tuple of Key, got .*'users'"):
        type("Stringly", (AnalysisPass,), {attribute: ("users",)})


def test_options_are_frozen_fields():
    @dataclass(frozen=True)
    class WithOptions(CountUsers):
        limit: int = 3

    assert WithOptions(limit=4) == WithOptions(4) != WithOptions()
    assert repr(WithOptions()).endswith("WithOptions(limit=3)")
    with pytest.raises(dataclasses.FrozenInstanceError):
        WithOptions().limit = 5


def test_a_pass_takes_graph_modules_only():
    with pytest.raises(PassError, match="(?s)a pass takes a torch.fx.GraphModule, got Linear.*count_users"):
        CountUsers()(torch.nn.Linear(2, 2))


def test_comparing_symbolic_arguments_adds_no_guard():
    graph_module, _ = joint_graph(torch.nn.Linear(8, 4), (torch.randn(6, 8),), dynamic=True)
    size = next(n.meta["val"] for n in graph_module.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt))
    node = _calls(graph_module)[0]
    node.args = (*node.args, [size, 2])
    guards_before = len(size.node.shape_env.guards)

    @dataclass(frozen=True)
    class SetSize(AnalysisPass):
        mirrored: bool

        def run(self, graph_module):
            node.args = (*node.args[:-1], [12 - size if self.mirrored else size + 0, 2])

    assert not SetSize(mirrored=False)(graph_module).modified
    with pytest.raises(PassError, match="changed the graph"):  # although 12 - size is size at this batch
        SetSize(mirrored=True)(graph_module)
    assert len(size.node.shape_env.guards) == guards_before

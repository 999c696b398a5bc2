"""Which modules of a joint graph are the same work."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx, nn

from passes.analysis.repeated_blocks import REPEATED_BLOCKS, RepeatedBlocks, Repetition
from passes.analysis.shapes import SHAPES, Shapes
from passes.annotations import read
from passes.manager import PassManager
from tests.passes.joint import joint_graph

WIDTH = 8


class Block(nn.Module):
    """A residual block with attention-like sharing: the input is used three times."""

    def __init__(self, hidden: int = 2 * WIDTH, activation=torch.relu):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.activation = activation

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(self.activation(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), ids)


def repetition(model: nn.Module, *inputs: torch.Tensor) -> tuple[fx.GraphModule, Repetition]:
    graph_module, _ = joint_graph(model, inputs or (torch.arange(5),))
    PassManager([Shapes(), RepeatedBlocks()])(graph_module)
    return graph_module, read(REPEATED_BLOCKS, graph_module)


def paths(found: Repetition) -> list[list[str]]:
    return [[block.path for block in entry.blocks] for entry in found.classes]


@pytest.mark.parametrize("layers", [2, 4])
def test_equal_layers_are_one_class_with_forward_and_backward(layers):
    graph_module, found = repetition(Model([Block() for _ in range(layers)]))
    assert paths(found) == [[f"layers.{i}" for i in range(layers)]]
    assert found.classes[0].multiplicity == layers
    nodes = {node.name: node for node in graph_module.graph.nodes}
    for block in found.classes[0].blocks:
        tags = {nodes[name].meta["partitioner_tag"] for name in block.nodes}
        assert tags == {"is_forward", "is_backward"}
    products = [n.name for n in nodes.values() if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)]
    inside = {name for block in found.classes[0].blocks for name in block.nodes}
    # 3 linears per block, each 1 forward and 2 backward; the head's 3 stay outside
    assert len(inside.intersection(products)) == 9 * layers == len(products) - 3


def test_the_sums_of_gradients_belong_to_the_block_that_makes_them():
    graph_module, found = repetition(Model([Block(), Block(), Block()]))
    sums = {n.name for n in graph_module.graph.nodes if n.meta.get("is_gradient_acc")}
    per_block = [len(sums.intersection(block.nodes)) for block in found.classes[0].blocks]
    assert per_block == [2, 2, 2]  # of the norm's output (used twice) and of the residual
    assert sum(per_block) == len(sums)


def test_blocks_correspond_entry_by_entry():
    graph_module, found = repetition(Model([Block(), Block(), Block()]))
    nodes = {node.name: node for node in graph_module.graph.nodes}
    blocks = found.classes[0].blocks
    for column in zip(*(block.nodes for block in blocks), strict=True):
        assert len({nodes[name].target for name in column}) == 1
        assert len({read(SHAPES, nodes[name]) for name in column}) == 1
    for column in zip(*(block.inputs for block in blocks), strict=True):
        assert len({read(SHAPES, nodes[name]) for name in column}) == 1
    for block in blocks:
        inside = set(block.nodes)
        read_outside = {s.name for name in block.nodes for s in nodes[name].all_input_nodes if s.name not in inside}
        assert set(block.inputs) == read_outside
        assert set(block.outputs) == {n for n in block.nodes if any(u.name not in inside for u in nodes[n].users)}
    assert not any(set(a.nodes) & set(b.nodes) for a, b in itertools.combinations(blocks, 2))


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([Block(), Block(hidden=4), Block(), Block(hidden=4)], [["layers.0", "layers.2"], ["layers.1", "layers.3"]]),
        ([Block(), Block(activation=torch.tanh), Block()], [["layers.0", "layers.2"]]),
        ([Block(), Block(hidden=4)], []),
    ],
    ids=["other shapes", "other operators", "nothing repeated"],
)
def test_blocks_that_differ_are_kept_apart(blocks, expected):
    assert paths(repetition(Model(blocks))[1]) == expected


class Scaled(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x):
        return self.linear(x) * self.factor


def test_another_constant_is_another_block():
    assert paths(repetition(Model([Scaled(2.0), Scaled(3.0), Scaled(2.0)]))[1]) == [["layers.0", "layers.2"]]


class Compared(nn.Module):
    """Same operators, shapes and backward as its twin, wired otherwise."""

    def __init__(self, twisted: bool):
        super().__init__()
        self.linear, self.twisted = nn.Linear(WIDTH, WIDTH), twisted

    def forward(self, x):
        a, b = x.detach().sin(), x.detach().cos()
        return self.linear(x) * (b > a if self.twisted else a > b)


def test_other_wiring_is_another_block():
    blocks = [Compared(False), Compared(True), Compared(False)]
    assert paths(repetition(Model(blocks))[1]) == [["layers.0", "layers.2"]]


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, a, b):
        return self.linear(x) + a[:, :WIDTH] * b[:, :WIDTH]


class Wired(nn.Module):
    """Gives its blocks inputs from outside: the i-th gets those that the i-th word names."""

    def __init__(self, *words: str):
        super().__init__()
        self.layers, self.words = nn.ModuleList(TwoInputs() for _ in words), words

    def forward(self, x, **sides):
        for layer, word in zip(self.layers, self.words, strict=True):
            x = layer(x, *(sides[name] for name in word))
        return x


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ab", "ba", "bc"), [["layers.0", "layers.1", "layers.2"]]),
        (("ab", "aa", "bc", "bb"), [["layers.0", "layers.2"], ["layers.1", "layers.3"]]),  # two inputs, or one twice
        (("ab", "aw", "bc"), [["layers.0", "layers.2"]]),  # w has another shape, cut to the same
    ],
)
def test_inputs_from_outside_count(words, expected):
    sides = {name: torch.randn(5, 2 * WIDTH if name == "w" else WIDTH) for name in "abcw"}
    graph_module, _ = joint_graph(Wired(*words), {"x": torch.randn(5, WIDTH, requires_grad=True), **sides})
    PassManager([Shapes(), RepeatedBlocks()])(graph_module)
    assert paths(read(REPEATED_BLOCKS, graph_module)) == expected


def test_a_result_that_is_used_outside_counts():
    class Peeked(nn.Module):
        """Returns its middle value too, which costs nothing until somebody uses it."""

        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            middle = torch.tanh(self.up(x))
            return self.down(middle), middle

    class Watcher(Model):
        def forward(self, ids):
            x, middle = self.embed(ids), []
            for layer in self.layers:
                x, value = layer(x)
                middle.append(value)
            return x, middle[1].detach()

    assert paths(repetition(Watcher([Peeked(), Peeked(), Peeked()]))[1]) == [["layers.0", "layers.2"]]


def _apply(subgraph: fx.GraphModule, x: torch.Tensor) -> torch.Tensor:
    """Stands for a higher-order operator."""
    return subgraph(x)


def test_subgraphs_count_by_what_they_do():
    root, graph = nn.Module(), fx.Graph()
    root.first, root.second = (fx.symbolic_trace(lambda x: x.sin()) for _ in range(2))
    root.third = fx.symbolic_trace(lambda x: x.cos())
    value = graph.placeholder("x")
    value.meta["val"] = torch.ones(2)
    for index, name in enumerate(["first", "second", "third"]):
        value = graph.call_function(_apply, (graph.get_attr(name), value))
        value.meta.update(val=torch.ones(2), nn_module_stack={str(index): (f"L['self'].layers.{index}", nn.Module)})
    graph.output(value)
    graph_module = fx.GraphModule(root, graph)
    PassManager([Shapes(), RepeatedBlocks()])(graph_module)
    assert paths(read(REPEATED_BLOCKS, graph_module)) == [["layers.0", "layers.1"]]


@pytest.mark.parametrize("source", ["L['self'].m.layers.{}", "L['fn'].m.layers[{}]", "G['m']._modules['layers'].{}"])
def test_paths_are_plain_however_dynamo_spells_them(source):
    graph = fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = torch.ones(2)
    for index in range(2):
        value = graph.call_function(torch.neg, (value,))
        value.meta.update(val=torch.ones(2), nn_module_stack={"id": (source.format(index), nn.Module)})
    graph.output(value)
    graph_module = fx.GraphModule(nn.Module(), graph)
    PassManager([Shapes(), RepeatedBlocks()])(graph_module)
    assert paths(read(REPEATED_BLOCKS, graph_module)) == [["m.layers.0", "m.layers.1"]]


def test_another_dtype_is_another_block():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Scaled(2.0), Scaled(2.0), Scaled(2.0).double(), Scaled(2.0).double()])

        def forward(self, x):
            x = self.layers[1](self.layers[0](x)).double()
            return self.layers[3](self.layers[2](x))

    x = torch.randn(4, WIDTH, requires_grad=True)
    assert paths(repetition(Mixed(), x)[1]) == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]


def test_inner_lists_count_where_outer_blocks_differ():
    class Stage(nn.Module):
        def __init__(self, depth: int):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(depth))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    expected = [["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"]]
    assert paths(repetition(Model([Stage(2), Stage(1)]))[1]) == expected
    assert paths(repetition(Model([Stage(2), Stage(2)]))[1]) == [["layers.0", "layers.1"]]


def test_a_module_called_several_times_is_several_blocks():
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Scaled(2.0)])

        def forward(self, x):
            for _ in range(4):
                x = self.layers[0](x)
            return x

    x = torch.randn(4, WIDTH, requires_grad=True)
    # the last call's gradient starts the sums over the shared weight, so it has fewer additions
    assert paths(repetition(Looped(), x)[1]) == [["layers.0", "layers.0@1", "layers.0@2"]]


def test_backward_nodes_without_a_module_follow_their_forward_node():
    # BatchNorm first counts its calls, in an operator without a gradient
    layers = [layer for _ in range(2) for layer in (nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))]
    graph_module, before = repetition(nn.Sequential(*layers), torch.randn(4, 2, 5, requires_grad=True))
    assert paths(before) == [["0", "2"], ["1", "3"]]
    for node in graph_module.graph.nodes:
        node.meta.pop("fwd_nn_module_stack", None)
    RepeatedBlocks()(graph_module)
    assert read(REPEATED_BLOCKS, graph_module) == before


def test_a_model_without_lists_has_no_blocks():
    _, found = repetition(nn.Linear(3, 3), torch.randn(2, 3))
    assert found == Repetition(())
    assert str(found) == "none"

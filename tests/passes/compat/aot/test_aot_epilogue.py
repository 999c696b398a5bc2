"""AOTAutograd's epilogue of a graph: known if it only writes back new values, otherwise refused."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from passes import compat


def around(function: Callable[..., Any], *args: torch.Tensor, edit: Callable[[torch.fx.GraphModule], Any] = id) -> Any:
    """What is found of a function, of one result, while forward is compiled. edit: of Dynamo's graph, as it makes none."""
    found: list[Any] = []

    def compiled(gm: torch.fx.GraphModule, _: Any) -> Any:
        (output,) = gm.graph.find_nodes(op="output")
        values = [node.meta["val"] for node in output.args[0]]
        try:
            written = compat.mutated_inputs_as_traced(len(args))
            results = compat.results_as_traced(values[len(written):len(written) + 1])
            found.append((written, [differentiable for _, differentiable in results]))
        except compat.UnsupportedEpilogue as why:
            found.append(str(why))
        return gm.forward

    def backend(gm: torch.fx.GraphModule, examples: Any) -> Any:
        edit(gm)
        gm.recompile()
        return compat.aot_autograd(fw_compiler=compiled, bw_compiler=lambda backward, _: backward.forward)(gm, examples)

    torch.compiler.reset()
    torch.compile(function, backend=backend)(*args)
    (one,) = found
    return one


def test_inputs_that_change_are_known_in_order_and_by_how():
    def function(a, b, c, d):
        result = (a * c).sum()
        d.add_(1)
        with torch.no_grad():
            b.mul_(2)
        return result

    written, differentiable = around(function, torch.ones(3, requires_grad=True), *(torch.ones(3) for _ in range(3)))
    assert [(each.position, each.without_gradients) for each in written] == [(2, False), (3, True)], "in order of their use"
    assert written[0].metadata != written[1].metadata and differentiable == [True]


@pytest.mark.parametrize(("function", "why"), [
    (lambda a, b: b.add_(a).sum(), "gradients flow into"),
    (lambda a, b: (b.add_(1).sum(), a[:2]), "share memory"),
], ids=["a gradient", "a view"])
def test_what_a_copy_does_not_say_is_refused(function, why):
    assert why in around(function, torch.ones(3, requires_grad=True), torch.ones(3))


def test_an_input_of_another_shape_is_refused():
    def edit(gm: torch.fx.GraphModule) -> None:
        (x,) = gm.graph.find_nodes(op="placeholder")
        with gm.graph.inserting_after(x):
            gm.graph.call_method("unsqueeze_", (x, 0))

    assert "the shape, the strides or the memory" in around(lambda x: x.sum() + 1, torch.ones(3), edit=edit)


def test_inputs_of_one_memory_of_which_one_changes_are_refused():
    memory = torch.ones(8)
    assert "traced with other inputs" in around(lambda a, b: a.add_(1).sum() * b.sum(), memory[:6], memory[2:])

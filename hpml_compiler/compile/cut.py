"""A graph that goes through its batch in microbatches, cut into the parts that run: what is kept for the next launch.

It is data alone: graphs that are ready to be compiled, names, and fakes. Nothing of the graph that it was cut out of is needed
any more.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.compile.again import again_of, kept_for_again
from hpml_compiler.compile.lowering import values_of
from hpml_compiler.planning.microbatches import loss_of
from hpml_compiler.runtime.loss_inside import Again
from hpml_compiler.runtime.microbatches import kept_for_backward
from passes import compat
from passes.graph.nodes import returned_nodes
from passes.presets import around_loop, in_loop
from passes.transform.microbatches import AroundLoop, cut_loop


@dataclass(frozen=True)
class Parts:
    """What goes in and out of a graph and around its loop. given, results: fakes of what it takes, by name, and returns, of
    which so many are forward's. loss: name of the loss's tangent, if the loss is inside; again: what running the step once more
    takes, then. saved: fakes of what goes from forward to backward."""

    microbatches: int
    forward_outputs: int
    given: Mapping[str, Any]
    results: tuple[Any, ...]
    loop: AroundLoop
    loss: str | None
    again: Again | None
    saved: tuple[Any, ...]

    @staticmethod
    def of(marked: GraphModule, loop: AroundLoop, microbatches: int, forward_outputs: int, written: Container[int],
           others: bool, in_loop: list[Any]) -> Parts:
        """marked: the graph that the loop was cut out of. written: positions of inputs that the model changes in place. others:
        whether gradients may arrive at other outputs than the loss. in_loop: fakes of what the loop's forward hands to its
        backward, if all of that runs first."""
        values = {node.name: node.meta.get("val") for node in marked.graph.nodes}
        results = tuple(None if node is None else node.meta["val"] for node in returned_nodes(marked))
        loss = loss_of(marked)
        again = again_of(marked, loss, written, others)
        if loss is None:
            saved = [*(values[name] for name in kept_for_backward(loop, forward_outputs)), *in_loop]
        else:
            gradients = (x for x in results[forward_outputs:] if x is not None)
            saved = [*gradients, values[loss], *kept_for_again(marked, again)]
        return Parts(microbatches, forward_outputs, {name: values[name] for name in loop.given}, results, loop, loss, again,
                     tuple(saved))


@dataclass(frozen=True)
class Cut:
    """halves: forward and backward of one microbatch. saved: names of what the first hands to the second, in its order."""

    parts: Parts
    halves: tuple[GraphModule, GraphModule]
    saved: tuple[str, ...]


def cut_in_halves(marked: GraphModule, compiler: str, microbatches: int, forward_outputs: int, written: Container[int],
                  others: bool) -> Cut:
    """See `Parts.of`."""
    loop = cut_loop(marked)
    in_loop(compiler, len(loop.forward))(loop.body)
    # The one that saves little, with either compiler: saved values are what microbatches are for.
    halves = compat.min_cut_partition(loop.body, values_of(loop.body), len(loop.forward), None)
    saved = [node for node in returned_nodes(halves[0])[len(loop.forward):] if node is not None]
    parts = Parts.of(marked, ready(loop.around(), compiler), microbatches, forward_outputs, written, others,
                     [node.meta["val"] for node in saved] * microbatches)
    # By names, since lowering may put other nodes in their places.
    return Cut(parts, halves, tuple(node.name for node in saved))


def ready(loop: AroundLoop, compiler: str) -> AroundLoop:
    """With what is around the loop as it is compiled."""
    for segment in (*loop.before, *loop.after):
        if segment.gm is not None:
            around_loop(compiler)(segment.gm)
    return loop

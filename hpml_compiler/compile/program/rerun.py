"""Decide whether backward may have to rerun a microbatched step, and which state that takes; see
`runtime.program.fused_forward_backward`."""
from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.runtime.program.fused_forward_backward import RerunState, random_states
from hpml_compiler.runtime.program.microbatch_loop import MicrobatchLoop
from passes import compat
from passes.errors import HpmlError
from passes.graph.graph_signature import input_position
from passes.op_rules.rule_table import is_random
from passes.transforms.microbatch.tangent_linearity import nonlinear_calls

log = logging.getLogger("hpml")

SMALL_RANGE = 1e6
"""Largest number of a low-precision dtype, which needs a loss scale: float16 has 65,504, the 8-bit ones less."""


def rerun_state_of(marked: GraphModule, loss: str | None, forward_outputs: int, written: Container[int], whole: bool,
                   ) -> RerunState | None:
    """marked: the graph that the loop is cut out of. None where the loss is computed outside, and where gradients can arrive at
    the loss alone and can be scaled. written: positions of the inputs that the model mutates. whole: whether the step can be
    compiled for gradients at all outputs."""
    placeholders = marked.graph.find_nodes(op="placeholder")
    narrow = any(_is_narrow(node.meta.get("val")) for node in marked.graph.nodes)
    others = any(node.name.startswith("tangents") and node.name != loss for node in placeholders)
    nonlinear = nonlinear_calls(marked, loss, forward_outputs) if loss is not None else []
    if loss is None or not (narrow or nonlinear or (others and whole)):
        return None
    if nonlinear:
        log.info("gradients are not linear in that of the loss, at %s: a backward whose gradient of the loss differs from the "
                 "last one runs the microbatches again", ", ".join(nonlinear[:3]))
    primals = [node for node in placeholders if not node.name.startswith("tangents")]
    (device,) = {node.meta["val"].device for node in placeholders if node.name == loss}
    numbers = {node.name: number for node in primals if (number := compat.static_int(node.meta["val"])) is not None}
    return RerunState(
        tuple(node.name for node in primals if node.name not in numbers), numbers,
        frozenset(node.name for k, node in enumerate(primals) if input_position(node, k) in written),
        any(is_random(node.target) for node in marked.graph.nodes), device, narrow, not nonlinear)


def saved_for_rerun(marked: GraphModule, again: RerunState | None) -> list[Any]:
    """Fakes of the values saved for a rerun."""
    if again is None:
        return []
    by_name = {node.name: node.meta["val"] for node in marked.graph.find_nodes(op="placeholder")}
    states = random_states(again.device) if again.uses_rng else []
    with compat.fake_mode_of(marked):
        return [*(by_name[name] for name in again.names), *(torch.empty(x.shape, dtype=x.dtype) for x in states)]


def compiled_rerun(whole: Callable[[], Any]) -> MicrobatchLoop:
    """Compile the step for gradients at all outputs, inside a backward that is running."""
    runs = whole()
    if runs is None:
        raise HpmlError("a step with gradients at other outputs than the loss cannot be split into microbatches",
                        "backward", "compute the complete loss in the compiled model, or remove options['microbatches']")
    with compat.nested_compilation(runs.parts.inputs[runs.parts.loss]):
        return runs.schedule()


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point and torch.finfo(value.dtype).max < SMALL_RANGE

"""Errors for models that cannot be traced: the original error, the line of the model, and the next step."""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from passes import compat
from passes.errors import BadInput, shortened

_PRODUCTS = {
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
}
"""Operations whose operands have one dtype, which fake tensors do not check."""


def check_batch(batch: Any) -> None:
    """Raise BadInput for an invalid batch: names that are no text, or no rows."""
    if isinstance(batch, dict) and (wrong := [name for name in batch if not isinstance(name, str)]):
        raise BadInput(f"the batch names an argument {wrong[0]!r}, which is no name", "batch",
                       "name the arguments of forward with text, or give a tuple")
    tensors = [leaf for leaf in compat.pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if tensors and all(tensor.numel() == 0 for tensor in tensors):
        raise BadInput(f"the batch has no rows: its tensors have the shapes {[list(t.shape) for t in tensors[:3]]}", "batch",
                       "give a batch of at least one row")


def check_products(graph: GraphModule, model: nn.Module) -> None:
    """Raise BadInput for the first product of different dtypes, such as integers into a layer of floats."""
    for node in graph.graph.nodes:
        if node.target in _PRODUCTS:
            dtypes = {value.dtype for each in node.args if isinstance(each, Node)
                      and isinstance(value := each.meta.get("val"), torch.Tensor)}
            if len(dtypes) > 1:
                raise BadInput(f"the model multiplies {' by '.join(sorted(map(str, dtypes)))}, which torch refuses",
                               _line(str(node.meta.get("stack_trace", ""))) or type(model).__name__,
                               "convert the batch, as in x.float(), or the model, as in model.double()")


def not_traceable(model: nn.Module, batch: Any, error: BaseException) -> BadInput:
    """`error` in a sentence: for an error that Dynamo wraps, the inner error."""
    text = str(error)
    if "_local_scalar_dense" in text or "data-dependent" in text.lower():
        return BadInput("the model cannot be traced without running it: it turns a tensor's value into a number or a branch",
                        _line(text) or type(model).__name__,
                        "use torch.where in place of the branch, or run the script itself, where the graph breaks there")
    within = re.search(r"got (\w+)\((['\"])(.*?)\2\)", text, re.DOTALL)
    said = f"{within[1]}: {within[3]}" if within else next(iter(text.strip().splitlines()), "") or type(error).__name__
    call = "model(**batch)" if isinstance(batch, dict) else "model(*batch)" if isinstance(batch, Sequence) else "model(batch)"
    return BadInput(f"the model cannot be traced: {shortened(said, 400)}", _line(text) or type(model).__name__,
                    f"call {call} by hand: it has to run, and its loss to have a gradient")


def _line(text: str) -> str:
    """The last line of Python outside of torch that a traceback in `text` names."""
    places = [(file, line) for file, line in re.findall(r'File "([^"]+)", line (\d+)', text) if "site-packages" not in file]
    return f"{places[-1][0]}, line {places[-1][1]}" if places else ""

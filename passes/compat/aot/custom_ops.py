"""Python functions behind the custom operators of a graph."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library import custom_ops
from torch.fx import GraphModule


def custom_op_functions(gm: GraphModule) -> dict[str, Callable[..., Any]]:
    """Python functions of the `torch.library.custom_op` operators that a graph calls, by name. C++ operators and
    those registered through torch.library.Library alone have none that torch knows of."""
    definitions: Any = getattr(custom_ops, "OPDEFS", {})
    targets = {node.target for node in gm.graph.nodes if node.op == "call_function"}
    names = {schema.name for target in targets if (schema := getattr(target, "_schema", None)) is not None}
    found = {name: getattr(definitions[name], "_init_fn", None) for name in sorted(names) if name in definitions}
    return {name: function for name, function in found.items() if function is not None}

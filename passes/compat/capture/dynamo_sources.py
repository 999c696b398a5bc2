"""Dynamo's sources of graph inputs, and the objects that hold them."""
from __future__ import annotations

from typing import Any

import torch
from torch._guards import TracingContext

_NAMED_BY = "hpml_named_by"


def input_sources(gm: torch.fx.GraphModule) -> list[Any]:
    """Dynamo's source of each graph input, in order; None for an input that Dynamo made."""
    arguments = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    return [None if argument is None else argument.source for argument in arguments]


def naming_sources(gm: torch.fx.GraphModule) -> list[Any]:
    """The sources by which inputs are named: for those of an inlined graph, the sources that it had by itself."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [node.meta.get(_NAMED_BY, source) for node, source in zip(placeholders, input_sources(gm), strict=True)]


def asks_for_dynamic_sizes(gm: torch.fx.GraphModule) -> bool:
    """True if the script asked for symbolic sizes: with `torch.compile(dynamic=True)`, or `mark_dynamic` for an input."""
    if not torch._dynamo.config.assume_static_by_default:
        return True
    arguments = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    return any(getattr(getattr(x, "example", None), "_dynamo_dynamic_indices", None) for x in arguments)


def name_by(node: Any, source: Any) -> None:
    """Name a graph input by another source than Dynamo's."""
    node.meta[_NAMED_BY] = source


def source_name(source: Any) -> str:
    """A source as a Python expression, such as L['self']._modules['head']._parameters['weight']."""
    return str(source.name() if callable(source.name) else source.name)


def duplicated_inputs(gm: torch.fx.GraphModule) -> dict[Any, list[Any]]:
    """Source of a graph input -> the other sources of the same tensor."""
    found: dict[Any, list[Any]] = {source: [] for source in input_sources(gm) if source is not None}
    for guard in TracingContext.get().guards_context.dynamo_guards:
        other = getattr(guard.create_fn, "keywords", {}).get("source_b")
        if other is not None:
            for one, two in ((guard.originating_source, other), (other, guard.originating_source)):
                if one in found:
                    found[one].append(two)
    return found


def objects_to(source: Any) -> list[Any]:
    """The objects through which the compiled code reaches a source, the nearest first. Call it inside a
    backend. Ends before an object that is created on each access, such as `list(some.values())`."""
    import torch._dynamo.guards as module
    from torch._dynamo.symbolic_convert import InstructionTranslator

    guards: Any = module
    output: Any = InstructionTranslator.current_tx().output
    helpers = guards._get_closure_vars() if hasattr(guards, "_get_closure_vars") else guards.CLOSURE_VARS
    scope = {**helpers, "L": output.local_scope, "G": output.global_scope}
    found: list[Any] = []
    while (base := getattr(source, "base", None)) is not None:
        source = base
        try:
            value = eval(source_name(source), scope)
        except Exception:  # an expression of Dynamo's for its own use
            continue
        if value is eval(source_name(source), scope):
            found.append(value)
    if type(source).__name__ == "GlobalSource":
        found.append(output.global_scope)
    return found

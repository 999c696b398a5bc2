"""The entry point `torch.compile(model, backend="hpml")` finds. Importing it is cheap; the work is in `compile/`."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.runtime import uncompiled, wrappers
from passes.compat import as_given, changes_of_scalars_stay
from passes.errors import BadInput


def hpml(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: on one device as inductor does, on N ranks as the planner decides.

    `options` are those of `hpml_compiler.options.Options`; `mode` is accepted for torch.compile's sake and only
    "default" (or None) is known. Raises BadInput for anything else.
    """
    from hpml_compiler.compile.dispatch import compile_graph
    from hpml_compiler.options import Options, defaults

    uncompiled.graph_came()
    changes_of_scalars_stay()
    if mode not in (None, "default"):
        raise BadInput(f"mode={mode!r} is not known", where="torch.compile",
                       next_step="leave it out; what the modes of inductor tune is not exposed here")
    return compile_graph(gm, as_given(example_inputs), Options.parse({**defaults, **(options or {})}))


# Torch loads this module inside of torch.compile, before it makes the compiled module.
wrappers.watch(hpml)

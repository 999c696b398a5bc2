"""The entry point `torch.compile(model, backend="hpml")` finds. Importing it is cheap; the work is in `engine`."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule


def hpml(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: on one device as inductor does, on N ranks as the planner decides.

    `options` are those of `hpml_compiler.options.Options`; `mode` is accepted for torch.compile's sake and only
    "default" (or None) is known. Raises BadInput for anything else.
    """
    from hpml_compiler.engine import compile_graph
    from hpml_compiler.options import Options
    from passes.errors import BadInput

    if mode not in (None, "default"):
        raise BadInput(f"mode={mode!r} is not known", where="torch.compile",
                       next_step="leave it out; what the modes of inductor tune is not exposed here")
    return compile_graph(gm, example_inputs, Options.parse(options))

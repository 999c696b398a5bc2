"""The entry point `torch.compile(model, backend="hpml")` finds. Importing it is cheap; the work is in `compile/`."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.integrations import ddp_fsdp_guard
from hpml_compiler.runtime.install import uncompiled_models
from passes.compat import allow_scalar_mutation, original_inputs
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

    uncompiled_models.graph_came()
    allow_scalar_mutation()
    if mode not in (None, "default"):
        raise BadInput(f"mode={mode!r} is not known", where="torch.compile",
                       next_step="leave it out; what the modes of inductor tune is not exposed here")
    return compile_graph(gm, original_inputs(example_inputs), Options.parse({**defaults, **(options or {})}))


# Torch loads this module inside of torch.compile, before it makes the compiled module.
ddp_fsdp_guard.watch(hpml)

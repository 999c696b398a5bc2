"""Entry point of `torch.compile(model, backend="hpml")`. Importing it is cheap; the work is in `compile/`."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.integrations import ddp_fsdp_guard
from hpml_compiler.runtime.install import uncompiled_models
from passes.compat import (
    allow_scalar_mutation,
    compiled_module_type,
    drop_unread_function_outputs,
    log_once_while_tracing,
    original_inputs,
)
from passes.errors import BadInput
from passes.session_state import state_of


def hpml(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: with inductor on one device, as planned on several ranks.

    `options`: see `hpml_compiler.options.Options`. `mode`: torch.compile passes it; only "default" (or None) is
    supported. Raises BadInput otherwise.
    """
    from hpml_compiler.compile.dispatch import compile_graph
    from hpml_compiler.options import DefaultOptions, Options

    uncompiled_models.graph_came()
    allow_scalar_mutation()
    log_once_while_tracing()
    if mode not in (None, "default"):
        raise BadInput(f"mode={mode!r} is not supported", where="torch.compile",
                       next_step="leave it out; hpml does not expose inductor's modes")
    drop_unread_function_outputs(gm)
    return compile_graph(gm, original_inputs(example_inputs), Options.parse({**state_of(DefaultOptions), **(options or {})}))


# Torch loads this module inside torch.compile, before it makes the compiled module.
ddp_fsdp_guard.watch()
if compiled_module_type() is not None:  # else this module was imported before Dynamo
    log_once_while_tracing()

"""The entry point `torch.compile(model, backend="hpml")` finds. Importing it is cheap; the work is in `compile/`."""
from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.runtime import wrappers
from passes.compat import changes_of_scalars_stay, dynamo_tried_in_vain
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

    atexit.unregister(_warn_of_nothing_compiled)
    changes_of_scalars_stay()
    if mode not in (None, "default"):
        raise BadInput(f"mode={mode!r} is not known", where="torch.compile",
                       next_step="leave it out; what the modes of inductor tune is not exposed here")
    return compile_graph(gm, example_inputs, Options.parse({**defaults, **(options or {})}))


# Torch loads this module inside of torch.compile, before it makes the compiled module.
wrappers.watch(hpml)


@atexit.register
def _warn_of_nothing_compiled() -> None:
    """Torch loads this module when a model is compiled for it. Where Dynamo then gives up on the model, it runs as it is,
    and nothing else would tell that every rank did all of the work. A script that never called the model, or that ended
    with an error, has other things to say."""
    if hasattr(sys, "last_value") or not dynamo_tried_in_vain():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK", "0") == "0":
        logging.getLogger("hpml").warning(
            "no graph came to the backend: every rank ran the whole model. Dynamo skips what it cannot trace (nn.LSTM and "
            "other recurrent layers, unless torch._dynamo.config.allow_rnn is set); TORCH_LOGS=graph_breaks says what")

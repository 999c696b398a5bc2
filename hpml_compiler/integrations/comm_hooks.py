"""Communication hooks of DDP as compressions of gradients: hooks that torch comes with are mapped to options['compress']."""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.distributed.tensor import DTensor

from hpml_compiler.options import DefaultOptions
from passes.errors import BadInput
from passes.hardware.gradient_compression import EVERY
from passes.session_state import state_of

log = logging.getLogger("hpml")
WHERE = "register_comm_hook of DDP around a model compiled with backend='hpml'"
REMEDY = ('give torch.compile options={"compress": "bf16"}, "fp16" or "powersgd:4" in its place, by mesh axis as in '
          '{"compress": {"dp": "bf16"}}, or leave the hook out')
BUILT_IN: Any = cast("Any", dist).BuiltinCommHookType
KNOWN: dict[Any, str] = {
    default_hooks.allreduce_hook: "", default_hooks.bf16_compress_hook: "bf16", default_hooks.fp16_compress_hook: "fp16",
    BUILT_IN.ALLREDUCE: "", BUILT_IN.FP16_COMPRESS: "fp16"}


def compression_of(hook: Any, state: Any, module: nn.Module) -> dict[str, str]:
    """The option `compress` that does what a hook does, over all ranks. Raises BadInput for any other hook, and for a model
    whose graphs were compiled without it."""
    known = KNOWN.get(hook)
    if hook is powerSGD_hook and state.use_error_feedback:
        known = f"powersgd:{state.matrix_approximation_rank}"
        log.info("PowerSGD begins with the first step, not after %d as the hook would", state.start_powerSGD_iter)
    if known is None:
        name = getattr(hook, "__name__", type(hook).__name__)
        raise BadInput(f"gradients are reduced inside of the compiled graphs, where {name} does not run", WHERE, REMEDY)
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise BadInput("the model has run already, and its graphs reduce gradients without the hook", WHERE,
                       "register the hook before the first call")
    return {EVERY: known} if known else {}


@contextlib.contextmanager
def compressing(compress: dict[str, str]) -> Iterator[None]:
    """Context in which graphs are compiled with this compression, where their options give none."""
    defaults = state_of(DefaultOptions)
    before = dict(defaults)
    if compress:
        defaults["compress"] = compress
    try:
        yield
    finally:
        defaults.clear()
        defaults.update(before)

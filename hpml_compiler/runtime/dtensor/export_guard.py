"""Refuse to export or script a model with placed parameters, with the next step."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from passes import compat
from passes.errors import BadInput


def cannot_export(by: str) -> BadInput:
    return BadInput(
        "the model's parameters are sharded over the ranks, and an exported program would hold shards",
        by,
        "export a copy with full parameters: copy = Model(); copy.load_state_dict(state), where every rank calls "
        "state = hpml_compiler.full_state_dict(model) and rank 0 gets it",
    )


@functools.cache
def watch_torchscript() -> None:
    """Make TorchScript refuse modules with placed parameters: it would crash, or save one rank's shards."""
    for name in ("jit.script", "jit.trace"):
        compat.replace_for_good({name: functools.partial(_refusing, f"torch.{name}")})


def _refusing(by: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def refusing(obj: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, nn.Module) and any(isinstance(p, DTensor) for p in obj.parameters()):
            raise cannot_export(by)
        return function(*(() if obj is None else (obj,)), *args, **kwargs)

    return refusing

"""Types of the options' values, with what parses them."""
from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.units import (
    parse_axes,
    parse_budget,
    parse_chunks,
    parse_compression,
    parse_names,
    parse_recompute,
    parse_watts,
)
from passes.checkpointing.pinned_recomputation import Recompute

OptimizerOption = Literal["auto", "adamw", "adam", "sgd", "sgd_momentum", "rmsprop", "adagrad"]
OptimizerName = Literal["adamw", "adam", "sgd", "sgd_momentum", "rmsprop", "adagrad"]

Offload = Literal["off", "saved", "optimizer", "all"]

# optimizer state tensors per parameter, each of the parameter's shape and dtype, as torch.optim allocates them
OPTIMIZER_STATES: dict[OptimizerName, int] = {
    "adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "rmsprop": 1, "adagrad": 1,
}


def _path_text(value: object) -> object:
    if isinstance(value, MixedPlan):
        raise ValueError("a MixedPlan (groups of different devices) cannot be run yet: give the plan of one group, "
                         "MixedPlan.groups[...].plan, on the devices of that group")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _level(value: object) -> object:
    if isinstance(value, bool):  # True == 1
        raise ValueError("a boolean is not a level: give 'auto', 0, 1, 2 or 3")
    return value


Budget = Annotated[int | float, BeforeValidator(parse_budget)]
Watts = Annotated[float, BeforeValidator(parse_watts)]
ZeroLevel = Annotated[Literal["auto", 0, 1, 2, 3], BeforeValidator(_level)]
AxisSizes = Annotated[dict[str, int], BeforeValidator(parse_axes)]
Chunks = int | Literal["auto"]
LossChunks = Annotated[Chunks, BeforeValidator(parse_chunks)]
Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]
RecomputeByBlock = Annotated[dict[str, Recompute], BeforeValidator(parse_recompute)]
Compression = Annotated[dict[str, str], BeforeValidator(parse_compression)]
Folder = Annotated[str, BeforeValidator(_path_text), Field(min_length=1)]
PlanOrPath = Annotated[str | Plan, BeforeValidator(_path_text)]

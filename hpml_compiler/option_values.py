"""Types of the options' values, with what parses them."""
from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.plan_json import is_mixed, read_plan
from hpml_compiler.units import (
    divisors,
    parse_axes,
    parse_budget,
    parse_chunks,
    parse_compression,
    parse_local_steps,
    parse_names,
    parse_outer_optimizer,
    parse_recompute,
    parse_rows,
    parse_speeds,
    parse_watts,
)
from passes.batch_balance.row_counts import apportioned
from passes.checkpointing.pinned_recomputation import Recompute
from passes.errors import BadInput
from passes.hardware.gradient_compression import AVERAGE, EVERY, rank_of
from passes.hardware.mesh import BETWEEN

OptimizerOption = Literal["auto", "adamw", "adam", "sgd", "sgd_momentum", "rmsprop", "adagrad"]
OptimizerName = Literal["adamw", "adam", "sgd", "sgd_momentum", "rmsprop", "adagrad"]

Balance = Literal["off", "auto"]
Offload = Literal["off", "saved", "optimizer", "all"]

# optimizer state tensors per parameter, each of the parameter's shape and dtype, as torch.optim allocates them
OPTIMIZER_STATES: dict[OptimizerName, int] = {
    "adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "rmsprop": 1, "adagrad": 1,
}


def _path_text(value: object) -> object:
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
LocalSteps = Annotated[dict[str, int], BeforeValidator(parse_local_steps)]
OuterOptimizer = Annotated[tuple[float, float], BeforeValidator(parse_outer_optimizer)]
Rows = Annotated[dict[str, tuple[int, ...]] | Literal["even", "whole"], BeforeValidator(parse_rows)]
Speeds = Annotated[tuple[float, ...], BeforeValidator(parse_speeds)]
Folder = Annotated[str, BeforeValidator(_path_text), Field(min_length=1)]
PlanOrPath = Annotated[str | Plan | MixedPlan, BeforeValidator(_path_text)]


def outer_states(options: Any) -> int:
    """State tensors of the outer optimizer per parameter: the last average and momentum, except where replicas are averaged."""
    return 2 if options.local_steps and options.outer_optimizer != AVERAGE else 0


def equal_ranks(options: Any) -> int:
    """Number of ranks along dp with equal numbers of rows; 1 where the option gives others."""
    return 1 if "dp" in options.rows else (options.mesh or {}).get("dp", 1)


def needs_stages(mesh: Mapping[str, int] | None, schedule: str, virtual_stages: int) -> bool:
    """True if a schedule of stages is pinned, but no number of stages."""
    return (mesh or {}).get("pp", 1) == 1 and (schedule != "auto" or virtual_stages > 1)


def check_mesh(mesh: Mapping[str, int] | None, world_size: int, schedule: str, virtual_stages: int) -> None:
    """Check that a mesh multiplies to the number of ranks, and has stages for a pinned schedule. Raises BadInput."""
    if mesh is None or math.prod(mesh.values()) == world_size:
        if needs_stages(mesh, schedule, virtual_stages):
            name, value = ("schedule", schedule) if schedule != "auto" else ("virtual_stages", virtual_stages)
            raise BadInput(f"{name}={value!r} needs pipeline stages, but "
                           + (f"the mesh {mesh} has no axis pp" if mesh else "the step has none"),
                           f"options[{name!r}]", 'add the axis pp to the mesh, as in "mesh": {"pp": 2}, or leave it out')
        return
    total = math.prod(mesh.values())
    fitting = [f"{name}={world_size * size // total}" for name, size in mesh.items()
               if world_size * size % total == 0]
    changes = [f"set {each}" for each in fitting] + [f"start {total} ranks", "leave the mesh to the solver"]
    if "pp" in mesh:
        changes.append(f"take a pp that divides {world_size} ({', '.join(map(str, divisors(world_size)[:12]))})")
    raise BadInput(what=f"the mesh {mesh} multiplies to {total}, but there are {world_size} ranks",
                   where="options['mesh']", next_step=", or ".join(changes))


def _check_recompute(recompute: Mapping[str, str], others: Mapping[str, Any]) -> None:
    if recompute and others.get("memory_budget") is not None:
        raise ValueError("it is pinned together with memory_budget, under which hpml decides by cost what is recomputed: "
                         "give one of the two")


def _check_zero(zero: str | int, others: Mapping[str, Any]) -> None:
    gather = others.get("gather", "auto")
    if zero == 3 and gather == "once" or zero in (0, 1, 2) and gather == "each":
        how = "gathers parameters in each forward and backward" if zero == 3 else "gathers a parameter at most once a step"
        raise ValueError(f'zero={zero} {how}, but gather is pinned to "{gather}": leave one of the two out')


def _check_offload(offload: str, others: Mapping[str, Any]) -> None:
    if offload == "saved" and others.get("memory_budget") is None:
        raise ValueError("offloading saved activations needs a memory_budget: set one")


def _check_stages(value: str | int, others: Mapping[str, Any]) -> None:
    if (others.get("mesh") or {}).get("pp") == 1 and value not in ("auto", 1):
        raise ValueError('needs pipeline stages: the mesh has a pp of 1; use more, as in "mesh": {"pp": 2}, or leave pp out')


def _check_speeds(speeds: tuple[float, ...], others: Mapping[str, Any]) -> None:
    stages = (others.get("mesh") or {}).get("pp", 1)
    if speeds and len(speeds) != stages:
        raise ValueError(f"{len(speeds)} speeds for {stages} pipeline ranks: give one for each, and pin pp in the mesh")


def _check_compress(compress: Mapping[str, str], others: Mapping[str, Any]) -> None:
    if unknown := sorted(set(compress) - {*(others.get("mesh") or compress), EVERY, BETWEEN} | {"pp"} & set(compress)):
        raise ValueError(f"no gradients are reduced along {unknown[0]!r}: name another axis of the mesh")
    may_hold = (1, 2) if others.get("memory_budget") is None else (1, 2, "auto")
    if others.get("zero") in may_hold and any(map(rank_of, compress.values())):
        raise ValueError("PowerSGD needs parameters that are not gathered once a step: pin zero to 0 or 3")


def _check_local_steps(local_steps: Mapping[str, int], others: Mapping[str, Any]) -> None:
    if not local_steps:
        return
    mesh = others.get("mesh") or {}
    axis = next(iter(local_steps))
    if len(local_steps) > 1 or axis in (EVERY, "pp", "tp"):
        raise ValueError(f"replicas train apart along one mesh axis that splits the batch, not along {', '.join(local_steps)}: "
                         'write {"dp": 8}')
    if axis != BETWEEN and axis not in mesh:
        raise ValueError(f"{axis!r} is no axis of the mesh ({', '.join(mesh) or 'not set'}): pin it, as in "
                         f'"mesh": {{{axis!r}: 2}}')
    if axis in others.get("rows", ()) and not isinstance(others["rows"], str):
        raise ValueError(f"replicas have equal numbers of rows: leave {axis!r} out of rows")
    if axis in others.get("compress", ()):
        raise ValueError(f"no gradients are sent along {axis!r}, so that none can be compressed: leave it out of compress")
    if others.get("zero") in (1, 2, 3) and axis in mesh and not set(mesh) - {axis, "tp", "pp"}:
        raise ValueError(f"replicas along {axis!r} keep whole parameters, so that zero={others['zero']} needs another axis: "
                         "add one to the mesh, or leave zero out")


def _check_outer(outer: tuple[float, float], others: Mapping[str, Any]) -> None:
    if not others.get("local_steps"):
        raise ValueError('it updates parameters once in local_steps: set that, too, as in "local_steps": {"dp": 8}')


def _check_rows(rows: Mapping[str, tuple[int, ...]] | str, others: Mapping[str, Any]) -> None:
    if isinstance(rows, str):
        return
    mesh = others.get("mesh") or {}
    for axis, counts in rows.items():
        if mesh.get(axis) != len(counts):
            raise ValueError(f"it has {len(counts)} numbers of rows for the axis {axis!r}, but the mesh is "
                             f'{mesh or "not set"}: pin the axis, as in "mesh": {{{axis!r}: {len(counts)}}}')
        if axis in ("tp", "pp"):
            raise ValueError(f"the axis {axis!r} does not split the batch: give the rows along dp")
        if any(count % others.get("microbatches", 1) for count in counts):
            raise ValueError(f"the rows {list(counts)} of axis {axis!r} do not divide into {others['microbatches']} "
                             "microbatches: give multiples of that")


def _check_redundancy(redundancy: int, others: Mapping[str, Any]) -> None:
    if redundancy and any(map(rank_of, (others.get("compress") or {}).values())):
        raise ValueError("the state of PowerSGD is not copied to other ranks: leave redundancy or compress out")
    if redundancy and others.get("local_steps"):
        raise ValueError("parameters of replicas that train apart are not copied: leave redundancy or local_steps out")


def _check_balance(balance: str, others: Mapping[str, Any]) -> None:
    mesh = others.get("mesh") or {}
    if balance == "off":
        return
    if mesh.get("dp", 1) == mesh.get("pp", 1) == 1:
        raise ValueError('rows move along the axis dp, blocks along pp: pin one, as in "mesh": {"dp": 2}')
    if mesh.get("pp", 1) > 1 and others.get("offload") in ("optimizer", "all"):
        raise ValueError("offloaded state does not move between pipeline stages: leave offload or balance out")
    if mesh.get("pp", 1) > 1 and any(map(rank_of, (others.get("compress") or {}).values())):
        raise ValueError("the state of PowerSGD does not move between pipeline stages: leave compress or balance out")
    if others.get("local_steps"):
        raise ValueError("replicas have equal numbers of rows: leave local_steps out")
    if others.get("rows") == "whole":
        raise ValueError('with "rows": "whole", every rank may run all rows: leave one of the two out')
    if others.get("on_oom") == "replan":
        raise ValueError("graphs are compiled again for one reason: leave on_oom out")


CHECKS: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "rows": _check_rows, "recompute": _check_recompute, "zero": _check_zero, "offload": _check_offload,
    "schedule": _check_stages, "virtual_stages": _check_stages, "stage_speeds": _check_speeds,
    "compress": _check_compress,
    "local_steps": _check_local_steps, "outer_optimizer": _check_outer, "balance": _check_balance,
    "redundancy": _check_redundancy,
}
"""By option, the check of its value against the options before it. They raise ValueError."""


def plan_of_mesh(plan: str | Plan | MixedPlan | None) -> Plan | None:
    """The plan that an option names, as a value or by the path of its file. Raises BadInput, also for a mixed plan."""
    if isinstance(plan, MixedPlan):
        raise BadInput("this is a mixed plan (groups of different devices), not the plan of a mesh", "options['plan']",
                       "run it on all its devices, or take the plan of a group, MixedPlan.groups[...].plan")
    return Plan.load(plan) if isinstance(plan, str) else plan


def mixed_plan_of(plan: object) -> MixedPlan | None:
    """The mixed plan that an option names, as a value or by the path of its file, if it is one. Raises BadInput."""
    if not isinstance(plan, str):
        return plan if isinstance(plan, MixedPlan) else None
    text = read_plan(plan)
    return MixedPlan.from_json(text, plan) if is_mixed(text) else None


def mesh_and_rows(plan: MixedPlan, world_size: int) -> dict[str, Any]:
    """Options by which ranks run a mixed plan: one mesh over all groups, each with its rows, as even as possible on its ranks.

    Axes that were pinned beside dp are the inner ones in every group. Raises BadInput.
    """
    pinned: Any = plan.options.get("mesh") or {}
    inner = {name: size for name, size in pinned.items() if name != "dp"}
    where, rows = f"mixed plan for {plan.cluster}", list[int]()
    if plan.world_size != world_size:
        raise BadInput(f"the plan is for {plan.world_size} ranks, but there are {world_size}", where,
                       "start as many ranks as the groups have devices, group by group")
    if inner.get("pp", 1) > 1 or plan.options.get("microbatches", 1) != 1:
        raise BadInput("the plan has pipeline stages or microbatches, which groups of unlike devices choose each for itself",
                       where, "plan without pp and microbatches")
    for group in plan.groups:
        ranks = group.devices // math.prod(inner.values())
        if group.rows < ranks:
            raise BadInput(f"the group {group.cluster} has {group.rows} rows for {ranks} ranks along dp", where,
                           "give the group more rows, pin an axis tp beside dp, or run without the group's devices")
        rows += apportioned(group.rows, (1,) * ranks)
    budget = {} if (given := plan.options.get("memory_budget")) is None else {"memory_budget": given}
    return {"mesh": {"dp": len(rows), **inner}, "rows": {"dp": tuple(rows)}, **budget}

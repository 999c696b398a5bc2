"""The options of the backend, of `hpml_compiler.plan` and of the command line: one set, checked in one place."""
from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, ValidationInfo, field_validator

from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.schema import Objective
from hpml_compiler.plans.validation_errors import describe_errors
from hpml_compiler.units import in_mesh_order, parse_axes, parse_budget, parse_names, parse_watts
from passes.errors import BadInput
from passes.pipeline.schedule_orders import ScheduleName

OptimizerOption = Literal["auto", "adamw", "adam", "sgd", "sgd_momentum", "rmsprop", "adagrad"]
OptimizerName = Literal["adamw", "adam", "sgd", "sgd_momentum", "rmsprop", "adagrad"]

Offload = Literal["off", "saved", "optimizer", "all"]

# tensors of the parameter's own shape and dtype that torch.optim keeps for each parameter it updates
OPTIMIZER_STATES: dict[OptimizerName, int] = {
    "adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "rmsprop": 1, "adagrad": 1,
}


def _path_text(value: object) -> object:
    if isinstance(value, MixedPlan):
        raise ValueError("a MixedPlan, for groups of different devices, cannot be run yet: give the plan of one of its "
                         "groups, MixedPlan.groups[...].plan, on the devices of that group")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _level(value: object) -> object:
    if isinstance(value, bool):  # which equals 0 or 1
        raise ValueError("it is neither on nor off, but one of 'auto', 0, 1, 2 and 3")
    return value


Budget = Annotated[int | float, BeforeValidator(parse_budget)]
Watts = Annotated[float, BeforeValidator(parse_watts)]
ZeroLevel = Annotated[Literal["auto", 0, 1, 2, 3], BeforeValidator(_level)]
AxisSizes = Annotated[dict[str, int], BeforeValidator(parse_axes)]
AxisNames = Annotated[tuple[str, ...], BeforeValidator(parse_names)]
Folder = Annotated[str, BeforeValidator(_path_text), Field(min_length=1)]
PlanOrPath = Annotated[str | Plan, BeforeValidator(_path_text)]


class Options(BaseModel):
    """Checked options; a field's description is its help. Make them with `Options.parse`, whose errors are BadInput."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    compiler: Literal["inductor", "eager"] = Field(
        "inductor", description='what lowers the rewritten graphs: "inductor", or "eager" for fast tests and debugging'
    )
    mesh_order: AxisNames | None = Field(
        None, description="the axes of the mesh from the outermost, whose ranks are farthest apart, to the innermost, whose "
        'ranks are neighbors, such as ["tp", "dp"]; without it pp comes first, then dp, then other axes as given, then tp'
    )
    mesh: AxisSizes | None = Field(
        None, validate_default=True,
        description='sizes by axis, such as {"dp": 2, "tp": 2}, multiplying to the number of ranks; on dp the batch is '
        "sharded, on tp weights and other dims, on pp stages of a pipeline lie, on an axis of another name the solver decides",
    )
    memory_budget: Budget | None = Field(
        None, description='bytes per device that no step may exceed: an integer, or text such as "64MiB" or "24GB"; or a '
        'fraction of its memory, such as 0.8 or "80%"; what does not fit is computed once more in backward'
    )
    microbatches: int = Field(
        1, ge=1, description="how many parts of the batch a training step goes through, one after another, so that only one "
        "part's saved values are held; results are those of the whole batch")
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = Field(
        "auto", description='the order in which stages of a pipeline run microbatches; "auto": 1f1b, with virtual_stages '
        "interleaved")
    virtual_stages: int = Field(1, ge=1, description="how many stages of a pipeline each rank of the mesh's axis pp has")
    compile_blocks: Literal["auto", "on", "off"] = Field(
        "auto", description="whether equal blocks of a graph, as the layers of a model, are compiled once and called for each "
        'of them; "auto": where these calls take less than 1 % of the predicted step, on CPUs and with several ranks')
    zero: ZeroLevel = Field(
        "auto", description="how parameters are stored: 0 whole wherever they are read whole; 2 in parts, gathered once per "
        "step of the optimizer and held until it changes them; 3 in parts, gathered again in each forward and backward; 1 is "
        'read as 2; "auto" leaves it to the solver, parameter by parameter, which holds what was gathered only where there is '
        "a memory_budget"
    )
    solver: str = Field("HiGHS", min_length=1, description="a solver, by the name that PuLP has for it")
    solver_options: dict[str, JsonValue] = Field(
        default_factory=dict, description='keyword arguments for PuLP\'s solver, such as {"threads": 1}'
    )
    # below the default timeout of a process group (60 s), within which the other ranks wait for the plan
    time_limit: float = Field(30.0, gt=0, description="seconds of work for planning, on all meshes together, without tracing: "
                              "it is counted, so that a busy machine finds the same plan")
    gap: float = Field(1e-3, ge=0, description="relative gap to the proven bound at which the solver may stop")
    plan: PlanOrPath | None = Field(
        None, description="a Plan or the path of one, obeyed in place of solving; if it was made under a memory_budget and no "
        "other is given, that is the budget"
    )
    cluster: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="NODESxDEVICES:DEVICE, such as 8x8:h100-80g, or a JSON file; without it, the devices here"
    )
    costs: Literal["auto", "roofline", "measured"] = Field(
        "auto", description='prices: "measured" by `hpml profile` on the devices here, "roofline" from their data sheet; '
        '"auto" takes measured ones where there are some and no cluster is named'
    )
    trace_all_layers: bool = Field(
        False, description="true: `plan` traces every layer of a deep model, so that the plan can be passed back; "
        "false: it traces four of its repeated layers and counts the rest"
    )
    objective: Objective = Field(
        "time", description='what the solver minimizes: "time" of one step, or "energy" of one step on all devices'
    )
    power_cap: Watts | None = Field(
        None, description='watts that each device may draw: a number, or text such as "300W"; above its idle power'
    )
    optimizer: OptimizerOption = Field(
        "auto", description='the optimizer whose state counts as memory; "auto": with a memory budget the one that holds the '
        "parameters when they are compiled, else adamw"
    )
    offload: Offload = Field(
        "off", description='what may leave the memory of the device while it is not used, for the memory of the host or, of a '
        'CPU, a file: values "saved" for backward, under a memory_budget; the state of the "optimizer"; or "all" of that'
    )
    offload_folder: Folder | None = Field(None, description="where a CPU offloads to; without it, where temporary files are")
    monitor: bool = Field(True, description="whether a run compares what it takes with what was predicted")
    tensorboard: Folder | None = Field(None, description="a folder for that comparison as TensorBoard scalars")

    @field_validator("mesh")
    @classmethod
    def _in_order(cls, mesh: dict[str, int] | None, others: ValidationInfo) -> dict[str, int] | None:
        return in_mesh_order(mesh, others.data.get("mesh_order"))

    @field_validator("offload")
    @classmethod
    def _for_a_budget(cls, offload: str, others: ValidationInfo) -> str:
        if offload == "saved" and others.data.get("memory_budget") is None:
            raise ValueError("saved values are offloaded to meet a memory_budget, and there is none")
        return offload

    @field_validator("microbatches")
    @classmethod
    def _without_budget(cls, microbatches: int, others: ValidationInfo) -> int:
        if microbatches > 1 and others.data.get("memory_budget") is not None:
            raise ValueError("what a microbatch keeps is not chosen to meet a memory_budget yet: give one of the two")
        return microbatches

    @field_validator("memory_budget", "offload")
    @classmethod
    def _without_stages(cls, value: Any, others: ValidationInfo) -> Any:
        if (others.data.get("mesh") or {}).get("pp", 1) > 1 and value not in (None, "off"):
            raise ValueError("it does not go with stages of a pipeline yet, the mesh's axis pp: give one of the two")
        return value

    @field_validator("schedule", "virtual_stages")
    @classmethod
    def _with_stages(cls, value: Any, others: ValidationInfo) -> Any:
        if (others.data.get("mesh") or {}).get("pp", 1) == 1 and value not in ("auto", 1):
            raise ValueError('it is for the stages of a pipeline, and there are none: give them ranks, as in "mesh": {"pp": 2}')
        return value

    @classmethod
    def parse(cls, options: Mapping[str, Any] | Options | None) -> Options:
        """Options from what the user gave (torch.compile's `options=`). Raises BadInput that names the option, what is
        legal and, for an unknown name, the closest legal one."""
        if isinstance(options, Options):
            return options
        if options is not None and not isinstance(options, Mapping):
            raise BadInput(what=f"options are a dict, not {type(options).__name__}", where="options",
                           next_step='write options={"memory_budget": "24GB"}')
        given = dict(options or {})
        for name in given:
            if name not in cls.model_fields:
                raise BadInput(what=f"unknown option {name!r}{did_you_mean(str(name))}", where="options",
                               next_step="the options are " + ", ".join(cls.model_fields))
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise BadInput(what=f"bad option {describe_errors(error, most=1)}", where=f"options[{name!r}]",
                           next_step=f"{name}: {cls.model_fields[name].description}") from error

    @property
    def stage_ranks(self) -> int:
        """How many ranks a pipeline goes through: the size of the mesh's axis pp."""
        return (self.mesh or {}).get("pp", 1)

    @property
    def schedule_name(self) -> ScheduleName:
        if self.schedule != "auto":
            return self.schedule
        return "1f1b" if self.virtual_stages == 1 else "interleaved"

    @property
    def optimizer_name(self) -> OptimizerName:
        return "adamw" if self.optimizer == "auto" else self.optimizer

    @property
    def optimizer_states(self) -> int:
        """How many tensors of a trainable parameter's shape and dtype the optimizer keeps for it."""
        return OPTIMIZER_STATES[self.optimizer_name]

    def budget_bytes(self, memory_bytes: int) -> int | None:
        """The budget on a device with that much memory; None if there is none but that."""
        budget = self.memory_budget
        return int(budget * memory_bytes) if isinstance(budget, float) else budget

    @property
    def resident_states(self) -> int:
        """How many of them are in the device's memory all the time."""
        return 0 if self.offloads("optimizer") else self.optimizer_states

    def offloads(self, part: Literal["saved", "optimizer"]) -> bool:
        return self.offload in (part, "all")

    def load_plan(self) -> Plan | None:
        """The plan to obey, read from its file if a path was given. Raises BadInput."""
        return Plan.load(self.plan) if isinstance(self.plan, str) else self.plan

    def with_plan(self, world_size: int) -> Options:
        """With the plan to obey read from its file, once for all who ask for it, and, if it is for so many ranks, with the
        budget, the microbatches and the stages that it was made with, where none are given. Raises BadInput."""
        given = self.load_plan()
        if given is None:
            return self
        said = _made_with(given) if given.world_size == world_size else {}
        update = {"plan": given, **{k: x for k, x in said.items() if k not in self.model_fields_set}}
        if self.mesh == given.mesh and self.mesh_order is None:
            update["mesh"] = dict(given.mesh)  # in the order of its axes that the plan was made with
        return self.model_copy(update=update)

    def check_mesh(self, world_size: int) -> None:
        """Raises BadInput if a pinned mesh does not multiply to the number of ranks."""
        if self.mesh is None or math.prod(self.mesh.values()) == world_size:
            return
        total = math.prod(self.mesh.values())
        fitting = [f"{name}={world_size * size // total}" for name, size in self.mesh.items()
                   if world_size * size % total == 0]
        changes = [f"set {each}" for each in fitting] + [f"start {total} ranks", "leave the mesh to the solver"]
        raise BadInput(what=f"the mesh {self.mesh} multiplies to {total}, but there are {world_size} ranks",
                       where="options['mesh']", next_step=", or ".join(changes))

    def to_json(self) -> dict[str, JsonValue]:
        """The options that differ from the defaults, without the plan and what only runs heed, as plain JSON: what a plan is
        stamped with."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"plan", "monitor", "tensorboard", "offload_folder"})


def _made_with(plan: Plan) -> dict[str, Any]:
    """The options that say when and whether a value is computed, as they are in a plan."""
    found: dict[str, Any] = {}
    for graph in plan.step_graphs:
        if graph.kept is not None:
            found["memory_budget"] = graph.kept.budget_bytes
        if graph.microbatches is not None:
            found["microbatches"] = graph.microbatches.count
        if (pipe := graph.pipeline) is not None:
            found |= {"mesh": dict(plan.mesh), "schedule": pipe.schedule, "virtual_stages": pipe.virtual_stages}
    return found


defaults: dict[str, Any] = {}
"""Options for what names none: a library that compiles by a backend's name has no argument for them."""


def did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name, Options.model_fields, n=1, cutoff=0.75)
    return f" (did you mean {close[0]!r}?)" if close else ""

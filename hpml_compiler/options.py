"""Options shared by the backend, `hpml_compiler.plan` and the command line, with their validation."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, ValidationError, ValidationInfo, field_validator

from hpml_compiler.option_values import (
    CHECKS,
    OPTIMIZER_STATES,
    AxisSizes,
    Balance,
    Budget,
    Chunks,
    Compression,
    Folder,
    LocalSteps,
    LossChunks,
    Names,
    Offload,
    OptimizerName,
    OptimizerOption,
    OuterOptimizer,
    PlanOrPath,
    RecomputeByBlock,
    Rows,
    Speeds,
    Watts,
    ZeroLevel,
    check_mesh,
    mesh_and_rows,
    mixed_plan_of,
    outer_states,
    plan_of_mesh,
)
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plan_api.options_of_plan import made_with
from hpml_compiler.plans.schema import Objective
from hpml_compiler.plans.validation_errors import describe_errors, did_you_mean
from hpml_compiler.units import in_mesh_order
from passes.errors import BadInput
from passes.hardware.gradient_compression import local
from passes.json_records import FrozenMap
from passes.pipeline.schedule_orders import ScheduleName


class Options(BaseModel):
    """Validated options; a field's description is its help text. Make them with `Options.parse`, which raises BadInput."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    compiler: Literal["inductor", "eager"] = Field(
        "inductor", description='compiler of the rewritten graphs: "inductor", or "eager" for fast tests and debugging')
    mesh_order: Names | None = Field(
        None, description="order of the mesh axes, from the outermost (ranks farthest apart) to the innermost (adjacent "
        'ranks), such as ["tp", "dp"]; by default pp comes first, then dp, then other axes as given, then tp')
    mesh: AxisSizes | None = Field(
        None, validate_default=True,
        description='sizes of the mesh axes, such as {"dp": 2, "tp": 2}; their product is the number of ranks, or divides it: '
        "the rest is chosen. dp shards the batch, tp weights and other dims, pp holds stages; for other names hpml decides")
    memory_budget: Budget | None = Field(
        None, description='memory limit per device in bytes: an integer, or text such as "64MiB" or "24GB"; or a '
        'fraction of device memory, such as 0.8 or "80%"; activations that do not fit are recomputed in backward')
    recompute: RecomputeByBlock = Field(
        default_factory=dict, description='activations that blocks (such as layers) recompute in backward: "auto" decides by '
        'cost; "none" saves all; "selective" recomputes the inside of attention; "full" saves nothing but the inputs of each '
        'block; or values by pattern of block paths, such as {"layers.*": "full", "layers.0": "none"}, of which the last match '
        'counts')
    microbatches: int = Field(
        1, ge=1, description="number of microbatches per training step; they run one after another, so that the saved "
        "activations of one are in memory at a time; results are those of the whole batch; \"auto\" is 1 where that fits; else "
        "they are chosen, as `hpml plan` does, with pipeline stages where no microbatches fit")
    rows: Rows = Field(
        "even", description='rows of the batch for each rank along a mesh axis, such as {"dp": [5, 3]}; batches of other sizes '
        'are split in the same proportions; "even": as even as possible, also where the ranks do not divide the batch; '
        '"whole": every rank runs all rows of such a batch')
    gather: Literal["auto", "once", "each"] = Field(
        "auto", description='with microbatches, when a sharded parameter is gathered: "once", before the loop over them; or in '
        '"each" microbatch, in forward and again in backward, which takes less memory and more time; "auto" decides by cost')
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = Field(
        "auto", description='pipeline schedule; "auto" is 1f1b, or interleaved with virtual_stages '
        "above 1")
    virtual_stages: int = Field(1, ge=1, description="pipeline stages per rank of the mesh axis pp")
    stage_speeds: Speeds = Field(
        (), description="relative speeds of the ranks along pp, such as [2, 1], by which blocks are divided; equal by default")
    compile_blocks: Literal["auto", "on", "off"] = Field(
        "auto", description="regional compilation: equal blocks of a graph, such as layers of a model, are compiled once and "
        'called for each; "auto": where these calls take less than 1 % of the predicted step, on CPUs and with several ranks')
    outputs: Literal["auto", "whole"] = Field(
        "auto", description='outputs of the model besides the loss, such as logits: "auto" keeps them sharded until they are '
        'read, and on one device computes large ones when they are first read; "whole" returns them as eager code does')
    loss_chunks: LossChunks = Field(
        "auto", description='chunks of rows in which the loss is computed from the last hidden state, with its gradients, '
        "so that logits of a large vocabulary are in memory for one chunk at a time: their number; 1 computes it at once; "
        '"auto" decides by bytes; results are those of the whole batch')
    passes: Names = Field(
        (), description='names of registered passes, such as "my_pass", run in this order on each traced graph before it is '
        "analyzed; see the guide on writing a pass")
    zero: ZeroLevel = Field(
        "auto", description="parameter sharding: 0 keeps parameters unsharded where they are read unsharded; 2 shards them and "
        "gathers each once per optimizer step; 3 shards them and gathers again in each forward and backward; 1 is "
        'the same as 2; "auto" lets the solver choose for each parameter, and keeps gathered parameters only where there is '
        "a memory_budget"
    )
    solver: str = Field("HiGHS", min_length=1, description="name of a PuLP solver")
    solver_options: dict[str, JsonValue] = Field(
        default_factory=dict, description='keyword arguments for PuLP\'s solver, such as {"threads": 1}'
    )
    # below the default timeout of a process group (60 s), within which the other ranks wait for the plan
    time_limit: float = Field(30.0, gt=0, description="planning budget in seconds of work, over all meshes, without tracing; "
                              "counted in operations, so that a busy machine finds the same plan")
    gap: float = Field(1e-3, ge=0, description="relative optimality gap at which the solver may stop")
    plan: PlanOrPath | None = Field(
        None, description="a Plan, or the path of one, to use instead of solving; its memory_budget applies unless another "
        "is given"
    )
    cluster: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="NODESxDEVICES:DEVICE, such as 8x8:h100-80g, or a JSON file; by default the devices of this run"
    )
    costs: Literal["auto", "roofline", "measured"] = Field(
        "auto", description='source of costs: "measured" by `hpml profile` on these devices, "roofline" from their data sheet; '
        '"auto" uses measured costs where there are some and no cluster is given'
    )
    trace_all_layers: bool = Field(
        False, description="true: `plan` traces every layer of a deep model, so that a run can use the plan; "
        "false: it traces four of the repeated layers and extrapolates"
    )
    objective: Objective = Field(
        "time", description='objective of the solver: "time" of one step, or "energy" of one step on all devices')
    power_cap: Watts | None = Field(
        None, description='power limit per device in watts: a number, or text such as "300W"; above its idle power'
    )
    optimizer: OptimizerOption = Field(
        "auto", description='optimizer whose state counts as memory; "auto": with a memory budget the one that owns the '
        "parameters when they are compiled, else adamw"
    )
    compress: Compression = Field(
        default_factory=dict, description='gradients are sent in fewer bytes, which changes the numbers of a training: "bf16", '
        '"fp16" or "powersgd:RANK" along mesh axes that cross nodes, or by axis, such as {"dp": "bf16"}')
    local_steps: LocalSteps = Field(
        default_factory=dict, description="optimizer steps for which replicas train apart before their parameters are averaged "
        '(LocalSGD), which changes the numbers of a training: for the axis between nodes, or by mesh axis, such as {"dp": 8}')
    outer_optimizer: OuterOptimizer = Field(
        (1.0, 0.0), description='update of the parameters after local_steps: "average", their mean; "nesterov", by '
        'the difference from it as a gradient (DiLoCo), with learning rate 0.7 and momentum 0.9; or "nesterov:LR:MOMENTUM"')
    offload: Offload = Field(
        "off", description='offload to host memory or, on a CPU, to a file: "saved" activations, under a memory_budget; '
        'the state of the "optimizer"; or "all" of both'
    )
    offload_folder: Folder | None = Field(None, description="folder that a CPU offloads to; by default that of temporary files")
    on_oom: Literal["raise", "replan"] = Field(
        "raise", description='when a step runs out of memory: "raise" the error, or "replan": repeat it under a plan made with '
        "the measured figures, with more recomputation, microbatches or offloading")
    redundancy: int = Field(
        0, ge=0, description="ranks that hold a copy of what each rank has of sharded parameters and optimizer state, "
        "in memory, on other nodes first; under `hpml run --elastic`, all is put together from them when a rank is lost")
    balance: Balance = Field(
        "off", description='"auto" moves work from slow ranks to fast ones in training, as measured: rows, or blocks along pp')
    monitor: bool = Field(True, description="compare measured step time and memory with the prediction")
    tensorboard: Folder | None = Field(None, description="folder to write that comparison to, as TensorBoard scalars")
    _chosen: frozenset[str] = PrivateAttr(frozenset())

    @field_validator("mesh")
    @classmethod
    def _in_order(cls, mesh: dict[str, int] | None, others: ValidationInfo) -> dict[str, int] | None:
        return in_mesh_order(mesh, others.data.get("mesh_order"))

    @field_validator(*CHECKS)
    @classmethod
    def _with_others(cls, value: Any, others: ValidationInfo) -> Any:
        CHECKS[others.field_name or ""](value, others.data)
        return value

    @classmethod
    def parse(cls, options: Mapping[str, Any] | Options | None) -> Options:
        """Validate the options that a user gave (torch.compile's `options=`). Raises BadInput that names the option, the
        legal values and, for an unknown name, the closest legal one."""
        if isinstance(options, Options):
            return options
        if options is not None and not isinstance(options, Mapping):
            raise BadInput(what=f"options must be a dict, not {type(options).__name__}", where="options",
                           next_step='write options={"memory_budget": "24GB"}')
        given = {name: value for name, value in dict(options or {}).items() if (name, value) != ("microbatches", "auto")}
        for name in given:
            if name not in cls.model_fields:
                raise BadInput(what=f"unknown option {name!r}{did_you_mean(str(name), cls.model_fields)}", where="options",
                               next_step="the options are " + ", ".join(cls.model_fields))
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise BadInput(what=f"bad option {describe_errors(error, most=3)}", where=f"options[{name!r}]",
                           next_step=f"{name}: {cls.model_fields[name].description}") from error

    @property
    def stage_ranks(self) -> int:
        """Number of pipeline ranks: the size of the mesh axis pp."""
        return (self.mesh or {}).get("pp", 1)

    @property
    def row_weights(self) -> FrozenMap[str, tuple[int, ...]] | None:
        """Proportions of the ranks' numbers of rows by axis, equal by default; None where only equal numbers are possible."""
        return None if self.rows == "whole" else FrozenMap({} if isinstance(self.rows, str) else self.rows)

    @property
    def axis_compression(self) -> FrozenMap[str, str]:
        """Compression by mesh axis: of gradients, or `local_steps`, in which parameters are sent once."""
        return FrozenMap({**self.compress, **{axis: local(steps) for axis, steps in self.local_steps.items()}})

    @property
    def shards_outputs(self) -> bool:
        """True if outputs besides the loss may stay sharded."""
        return self.outputs == "auto"

    @property
    def chunks(self) -> Chunks | Literal["budget"]:
        """Chunks of the loss. "budget" depends on the loss alone: a plan that traced fewer layers and a run choose the same."""
        return "budget" if self.loss_chunks == "auto" and self.chooses_saved else self.loss_chunks

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
        """Number of optimizer state tensors per trainable parameter, each of its shape and dtype."""
        return OPTIMIZER_STATES[self.optimizer_name]

    @property
    def chooses_saved(self) -> bool:
        """True if hpml, not the partitioner, decides which activations are saved."""
        return self.memory_budget is not None or bool(self.recompute)

    @property
    def is_compact(self) -> bool:
        """True if gradients are reduced a few at a time, which takes less memory."""
        return self.memory_budget is not None or self.zero in (1, 2, 3)

    def budget_bytes(self, memory_bytes: int) -> int | None:
        """memory_budget in bytes, for a device with `memory_bytes`; None without a budget."""
        budget = self.memory_budget
        return int(budget * memory_bytes) if isinstance(budget, float) else budget

    @property
    def resident_states(self) -> int:
        """Number of state tensors of optimizers, the outer one included, per parameter that stay in device memory."""
        return outer_states(self) + (0 if self.offloads("optimizer") else self.optimizer_states)
    def offloads(self, part: Literal["saved", "optimizer"]) -> bool:
        return self.offload in (part, "all")

    def load_plan(self) -> Plan | None:
        """The plan to use, read from its file if a path was given. Raises BadInput, also for a mixed plan: see `with_plan`."""
        return plan_of_mesh(self.plan)

    def with_plan(self, world_size: int) -> Options:
        """These options with `plan` loaded from its file. If that is for `world_size` ranks, its budget, microbatches and
        stages apply where these do not set them; of a mixed one, mesh and rows do. `redundancy` < ranks. Raises BadInput."""
        if self.redundancy >= world_size:
            return self.model_copy(update={"redundancy": world_size - 1}).with_plan(world_size)
        if (mixed := mixed_plan_of(self.plan)) is not None:
            return Options.parse(mesh_and_rows(mixed, world_size) | self.model_dump(exclude={"plan"}, exclude_unset=True))
        if (given := self.load_plan()) is None:
            return self
        from_plan = made_with(given) if given.world_size == world_size else {}
        update = {"plan": given, **{k: x for k, x in from_plan.items() if k not in self.model_fields_set}}
        if self.mesh == given.mesh and self.mesh_order is None:
            update["mesh"] = dict(given.mesh)  # in the plan's order of axes
        return self.model_copy(update=update)

    def with_chosen(self, values: Mapping[str, Any]) -> Options:
        """These options with what a search decided, which counts as decided, not as pinned."""
        made = self.model_copy(update=dict(values))
        made._chosen = self._chosen | values.keys() | ((made.mesh or {}).keys() - (self.mesh or {}).keys())
        return made

    @property
    def chosen(self) -> frozenset[str]:
        """Names of the options, and of the axes of the mesh, that a search decided."""
        return self._chosen

    def check_mesh(self, world_size: int) -> None:
        """Check that a pinned mesh multiplies to the number of ranks, with stages for a pinned schedule. Raises BadInput."""
        check_mesh(self.mesh, world_size, self.schedule, self.virtual_stages)

    def to_json(self, of_run: bool = False) -> dict[str, JsonValue]:
        """The options that differ from their defaults, as plain JSON, for the record in a plan. Leaves out the plan itself and
        options that matter only to a run. of_run: with those that all ranks of a run must have."""
        left_out = {"plan", "monitor", "tensorboard", "offload_folder", *(() if of_run else ("on_oom", "balance"))}
        return self.model_dump(mode="json", exclude_defaults=True, exclude=left_out)


class DefaultOptions(dict[str, Any]):
    """Options of this session for callers that cannot pass any: libraries that compile by the name of a backend."""

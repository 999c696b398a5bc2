"""The fields of a mixed plan and totals over its device groups."""
from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.plan_json import FORMAT_VERSION, PlanFile
from hpml_compiler.plans.record_fields import Count, Microseconds, Record
from hpml_compiler.plans.schema import MemoryBytes, PredictedCost

RowCounts = Annotated[tuple[Count, ...], Field(strict=False)]


class GroupShare(Record):
    """Share of the batch for one group of equal devices. `rows`, `fraction`: its rows and their share of the batch; `plan`: its
    plan for these rows; `step_time_us`: time of that plan's step, without the all-reduce between groups. A group that is left
    out has no rows and no plan, and its devices idle; `reason` says why."""

    cluster: str
    devices: Annotated[int, Field(ge=1)]
    rows: Count
    fraction: Annotated[float, Field(ge=0.0, le=1.0)]
    step_time_us: Microseconds
    plan: Plan | None
    reason: str = ""

    @model_validator(mode="after")
    def _a_plan_for_rows(self) -> GroupShare:
        if (self.plan is None) != (self.rows == 0):
            raise ValueError(f"group {self.cluster} has {self.rows} rows but {'no' if self.plan is None else 'a'} plan")
        if self.plan is not None and self.plan.world_size != self.devices:
            raise ValueError(f"group {self.cluster} has {self.devices} devices, but its plan has {self.plan.world_size}")
        return self


class CrossReduction(Record):
    """Reduction of gradients between the `groups` (a count) that take part: `bytes` of gradients in total, over the link
    `link`."""

    groups: Count
    bytes: Count
    link: str
    predicted_us: Microseconds


class Alternative(Record):
    """Another split of the rows and the step time with it; None and the reason if it is impossible."""

    rows: RowCounts
    step_time_us: Microseconds | None
    reason: str = ""


class ShareAttempt(Record):
    """A number of rows that a group was planned for, with its step time and peak bytes, or the reason why it is infeasible."""

    group: Count
    rows: Count
    step_time_us: Microseconds | None
    peak_bytes: Count | None
    reason: str = ""


class MixedContent(PlanFile):
    """Contents of a plan for groups of different devices, which share a batch of `batch` rows, and totals derived from them.

    estimated_bound_us: lower bound on the step time of the best split; it is an estimate, because step times for numbers of
    rows that were not planned are estimated. equal_split: rows in proportion to devices. single_group: the best single group.
    Both are None if the split was pinned. energy_j: energy of a step on all devices, waiting and idle ones included.
    """

    format_version: int = FORMAT_VERSION
    kind: Literal["mixed"] = "mixed"
    torch_version: str
    world_size: Annotated[int, Field(ge=1)]
    cluster: str
    options: dict[str, JsonValue]
    batch: Annotated[int, Field(ge=1)]
    groups: Annotated[tuple[GroupShare, ...], Field(strict=False)]
    cross: CrossReduction
    estimated_bound_us: Microseconds
    energy_j: Annotated[float, Field(ge=0.0)] | None = None
    equal_split: Alternative | None
    single_group: Alternative | None
    attempts: Annotated[tuple[ShareAttempt, ...], Field(strict=False)] = ()
    notes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    seconds: dict[str, Annotated[float, Field(ge=0.0)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _all_rows(self) -> MixedContent:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version is {self.format_version}, this hpml reads {FORMAT_VERSION}")
        if sum(group.rows for group in self.groups) != self.batch:
            raise ValueError(f"the groups' rows {[g.rows for g in self.groups]} do not add up to the batch of {self.batch}")
        if sum(group.devices for group in self.groups) != self.world_size:
            raise ValueError(f"the devices of all groups do not add up to world_size {self.world_size}")
        return self

    # -- costs ---------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> tuple[GroupShare, ...]:
        """The groups that take part."""
        return tuple(group for group in self.groups if group.plan is not None)

    @property
    def slowest(self) -> Plan:
        """The plan of the slowest group, which the others wait for."""
        plan = max(self.active, key=lambda group: group.step_time_us).plan
        assert plan is not None
        return plan

    @property
    def predicted(self) -> PredictedCost:
        """Predicted cost of a step: the slowest group's step plus the reduction between the groups.

        Between two reductions each group runs its optimizer step, forward and backward, so the slowest group sets the pace.
        """
        cost, cross_us = self.slowest.predicted, self.cross.predicted_us
        return cost.model_copy(update={"step_time_us": cost.step_time_us + cross_us, "energy_j": self.energy_j,
                                       "communication_us": cost.communication_us + cross_us})

    @property
    def power_w(self) -> float | None:
        """Predicted average power of one device during a step, in W; None if energy was not computed."""
        step_us = self.predicted.step_time_us
        return None if self.energy_j is None or not step_us else self.energy_j / (step_us * 1e-6) / self.world_size

    @property
    def memory(self) -> MemoryBytes:
        """Memory of the group whose devices have the highest peak."""
        return max((group.plan.memory for group in self.active if group.plan), key=lambda memory: memory.peak)

    def summary_json(self) -> dict[str, Any]:
        """The output of `hpml plan --json`: the keys of `Plan.summary_json`, with the slowest group's values where a sum has no
        meaning, and the keys of mixed plans only."""
        slowest, parts = self.slowest.summary_json(), [g.plan.summary_json() if g.plan else None for g in self.groups]
        made = [part for part in parts if part is not None]
        cost = self.predicted
        return {
            **slowest,
            "step_time_s": cost.step_time_us * 1e-6,
            # None: times between the numbers of rows that were planned are estimated.
            "bound_s": None, "bound_j": None, "gap": None, "simulated_s": None, "step_bound_s": None, "step_gap": None,
            "status": ", ".join(dict.fromkeys(part["status"] for part in made)),
            "mesh": None,
            "world_size": self.world_size,
            "cluster": self.cluster,
            "energy_j": self.energy_j,
            "power_w": self.power_w,
            "memory_bytes": self.memory.model_dump(),
            "predicted_s": {"compute": cost.compute_us * 1e-6, "communication": cost.communication_us * 1e-6,
                            "optimizer": cost.optimizer_us * 1e-6},
            "ilp": {name: sum(part["ilp"][name] for part in made) for name in slowest["ilp"]},
            "seconds": dict(self.seconds),
            "rejected": [], "families": [], "stages": [],
            "batch": self.batch,
            "estimated_bound_s": self.estimated_bound_us * 1e-6,
            "cross_group": {"groups": self.cross.groups, "bytes": self.cross.bytes, "link": self.cross.link,
                            "time_s": self.cross.predicted_us * 1e-6},
            "equal_split": _alternative_json(self.equal_split),
            "single_group": _alternative_json(self.single_group),
            "notes": list(self.notes),
            "groups": [
                {"cluster": group.cluster, "devices": group.devices, "rows": group.rows, "fraction": group.fraction,
                 "reason": group.reason, "step_time_s": group.step_time_us * 1e-6, "plan": part}
                for group, part in zip(self.groups, parts, strict=True)
            ],
        }


def _alternative_json(other: Alternative | None) -> dict[str, Any] | None:
    if other is None:
        return None
    step_us = other.step_time_us
    return {"rows": list(other.rows), "step_time_s": None if step_us is None else step_us * 1e-6, "reason": other.reason}

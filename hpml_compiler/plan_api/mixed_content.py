"""The fields of a mixed plan and the sums over its groups."""
from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.plan_json import FORMAT_VERSION, PlanFile
from hpml_compiler.plans.record_fields import Count, Microseconds, Record
from hpml_compiler.plans.schema import MemoryBytes, PredictedCost

RowCounts = Annotated[tuple[Count, ...], Field(strict=False)]


class GroupShare(Record):
    """What one group of like devices does: its `rows` of the batch, the `fraction` of the batch that they are, and its
    plan for them, whose step (without adding up between groups) takes `step_time_us`. A group that is left out has no
    rows and no plan, and its devices idle; `reason` says why."""

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
            raise ValueError(f"the group {self.cluster} has {self.rows} rows, and {'no' if self.plan is None else 'a'} plan")
        if self.plan is not None and self.plan.world_size != self.devices:
            raise ValueError(f"the group {self.cluster} has {self.devices} devices, its plan {self.plan.world_size}")
        return self


class CrossReduction(Record):
    """Adding up gradients between the `groups` that take part: `bytes` of gradients in all, over the link `link`."""

    groups: Count
    bytes: Count
    link: str
    predicted_us: Microseconds


class Alternative(Record):
    """Other shares of the rows and what a step would take with them; None and the reason where that is impossible."""

    rows: RowCounts
    step_time_us: Microseconds | None
    reason: str = ""


class ShareAttempt(Record):
    """A number of rows that a group was planned for: its part of the step and peak bytes, or why it cannot."""

    group: Count
    rows: Count
    step_time_us: Microseconds | None
    peak_bytes: Count | None
    reason: str = ""


class MixedContent(PlanFile):
    """What a plan for unlike devices holds, and what follows from that alone: shares of a batch of `batch` rows.

    estimated_bound_us: what the best shares would take at least, as far as the times of the numbers of rows that were not
    planned are estimated rightly. equal_split: rows in proportion to devices. single_group: the best of the groups, alone.
    Both are None where the shares were pinned. energy_j: of a step on all devices, those that wait or idle included.
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
            raise ValueError(f"the groups' devices do not add up to world_size {self.world_size}")
        return self

    # -- what it costs -------------------------------------------------------------------------------------------------

    @property
    def active(self) -> tuple[GroupShare, ...]:
        """The groups that take part."""
        return tuple(group for group in self.groups if group.plan is not None)

    @property
    def slowest(self) -> Plan:
        """The plan of the group that the others wait for."""
        plan = max(self.active, key=lambda group: group.step_time_us).plan
        assert plan is not None
        return plan

    @property
    def predicted(self) -> PredictedCost:
        """The step of the slowest group, and adding up between the groups.

        Between two such sums each group does its optimizer step, forward and backward, so the slowest sets the pace.
        """
        cost, cross_us = self.slowest.predicted, self.cross.predicted_us
        return cost.model_copy(update={"step_time_us": cost.step_time_us + cross_us, "energy_j": self.energy_j,
                                       "communication_us": cost.communication_us + cross_us})

    @property
    def power_w(self) -> float | None:
        """Predicted average power of one device during a step; None where its energy was not computed."""
        step_us = self.predicted.step_time_us
        return None if self.energy_j is None or not step_us else self.energy_j / (step_us * 1e-6) / self.world_size

    @property
    def memory(self) -> MemoryBytes:
        """Of the fullest device of all."""
        return max((group.plan.memory for group in self.active if group.plan), key=lambda memory: memory.peak)

    def summary_json(self) -> dict[str, Any]:
        """What `hpml plan --json` prints: the keys of `Plan.summary_json`, with those of the slowest group where a sum
        has no meaning, and what is mixed plans' own."""
        slowest, parts = self.slowest.summary_json(), [g.plan.summary_json() if g.plan else None for g in self.groups]
        made = [part for part in parts if part is not None]
        cost = self.predicted
        return {
            **slowest,
            "step_time_s": cost.step_time_us * 1e-6,
            "bound_s": None, "bound_j": None, "gap": None,  # times between the numbers of rows that were planned are estimated
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
            "rejected": [],
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

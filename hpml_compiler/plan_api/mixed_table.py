"""A mixed plan as a table: a row per device group, step times of other splits, then each group's own plan."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpml_compiler.plan_api.mixed_content import Alternative, MixedContent
from hpml_compiler.visualize import plan_table as like_devices
from hpml_compiler.visualize.formatting import format_bytes, format_mesh, format_us
from hpml_compiler.visualize.terminal import as_text


def render_text(plan: MixedContent, width: int | None = None) -> str:
    """The table as plain text of at most `width` columns (default: the terminal's)."""
    return as_text(renderable(plan), width)


def renderable(plan: MixedContent) -> RenderableType:
    """The table for a rich console."""
    cost = plan.predicted
    parts: list[RenderableType] = [
        Text(f"{plan.batch} rows on {plan.world_size} devices of {plan.cluster}, torch {plan.torch_version}"),
        Text(f"{format_us(cost.step_time_us)} a step predicted"),
        _groups(plan),
        Text(f"between groups  {_cross(plan)}"),
    ]
    parts += [Text(line) for line in _alternatives(plan)]
    parts += [Text(f"note            {note}") for note in plan.notes]
    for number, group in enumerate(plan.groups):
        if group.plan is not None:
            parts += [Text(""), Text(f"group {number}, {group.rows} rows"), like_devices.renderable(group.plan)]
    return Group(*parts)


def _groups(plan: MixedContent) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("group", overflow="fold", min_width=12)
    for name in ("rows", "share", "rows/device", "mesh", "step", "idle", "peak"):
        table.add_column(name, justify="right")
    slowest_us = max(group.step_time_us for group in plan.groups)
    for group in plan.groups:
        if group.plan is None:
            table.add_row(*map(Text, (group.cluster, "0", "0%", "0", "", "unused", "", "")))
            continue
        table.add_row(*map(Text, (
            group.cluster, str(group.rows), f"{group.fraction:.1%}", f"{group.rows / group.devices:.3g}",
            format_mesh(group.plan.mesh), format_us(group.step_time_us), format_us(slowest_us - group.step_time_us),
            format_bytes(group.plan.memory.peak),
        )))
    return table


def _cross(plan: MixedContent) -> str:
    if plan.cross.groups < 2:
        return "nothing: one group takes all rows"
    return (f"all-reduce of {format_bytes(plan.cross.bytes)} of gradients over {plan.cross.groups} groups by "
            f"{plan.cross.link}: {format_us(plan.cross.predicted_us)}, weighted by each group's share of the rows")


def _alternatives(plan: MixedContent) -> Iterator[str]:
    for group in plan.groups:
        if group.reason:
            yield f"unused          {group.cluster}: {group.reason}"
    for name, other in (("equal split", plan.equal_split), ("single group", plan.single_group)):
        if other is not None:
            yield f"{name:<16}{_describe(other, plan.predicted.step_time_us)}"


def _describe(other: Alternative, step_time_us: float) -> str:
    if other.step_time_us is None:
        return f"{_shares(other.rows)} rows: infeasible, {other.reason}"
    return (f"{_shares(other.rows)} rows: {format_us(other.step_time_us)}, "
            f"{other.step_time_us / step_time_us:.2f} times as long")


def _shares(rows: Sequence[int]) -> str:
    return " + ".join(map(str, rows))

"""A plan as one HTML page: overview, blocks, modules, simulated step, memory, what was rejected, and how to make it again."""
from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import graphviz

from hpml_compiler.pages.page_parts import Cell, details, page, picture, section, table, text
from hpml_compiler.pages.timeline_svg import memory_svg, timeline_svg
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.simulate.simulation import Simulation
from hpml_compiler.simulate.simulator import simulate
from hpml_compiler.visualize.description.records import ModuleSummary, PlanDescription, StepSummary
from hpml_compiler.visualize.formatting import (
    format_bytes,
    format_count,
    format_mesh,
    format_objective,
    format_place,
    format_us,
)
from hpml_compiler.visualize.plan_table import sharding_text
from passes.errors import HpmlError
from passes.filesystem.text_files import write_file

MOST_BLOCKS = 8
"""The costliest modules have a picture of their block."""
NO_DOT = "Graphviz's program dot is not installed, so this page has no pictures of the plan: apt-get install graphviz"


def write_page(plan: Plan, path: str | os.PathLike[str], command: list[str] | None = None) -> Path:
    """Write the page of a plan to `path`. command: what the plan was made with. Raises BadInput."""
    write_file(path, plan_page(plan, command), "the page of the plan")
    return Path(path)


def plan_page(plan: Plan, command: list[str] | None = None) -> str:
    found = plan.describe()
    title = format_place(found.mesh, found.devices, found.cluster)
    return page(title, [f"<h1>{text(title)}</h1>", *_parts(plan, found, command)])


def _parts(plan: Plan, found: PlanDescription, command: list[str] | None) -> Iterator[str]:
    yield from head(found)
    yield section("Overview", drawn(plan, view="overview", identifier="overview"),
                  '<p class="quiet">A click on a module or stage opens its block below.</p>')
    for number, step in enumerate(found.steps):
        yield section(f"Modules of {step.name}", _modules(step))
        yield section(f"Blocks of {step.name}", *_blocks(plan, step, number))
    try:
        played: Simulation | None = simulate(plan)
    except HpmlError as error:
        played = None
        yield section("Simulated step", f"<p>{text(error)}</p>")
    if played is not None:
        parts = (("compute", played.compute_us), ("exposed communication", played.exposed_communication_us),
                 ("bubble", played.bubble_us), ("optimizer", played.optimizer_us))
        yield section("Simulated step", f"<p>{format_us(played.step_us)} with overlap of computation and communication: "
                      + ", ".join(f"{name} {format_us(us)}" for name, us in parts if us) + "</p>",
                      picture(timeline_svg(played)), "<p>Memory of the fullest device</p>",
                      picture(memory_svg(played, found.limit_bytes)))
    rejected = [(format_mesh(each.mesh), "" if each.cost is None else format_objective(each.cost, each.objective),
                 "" if each.bound is None else format_objective(each.bound, each.objective), each.reason)
                for each in plan.rejected]
    yield section("Rejected", table(("mesh", "cost", "bound", "reason"), rejected) or "<p>nothing</p>")
    yield section("How to make it again", *_again(found, command))


def head(found: PlanDescription) -> Iterator[str]:
    """Step time, memory, and a table of the mesh's axes."""
    yield f"<p><b>{format_us(found.step_us)}</b> a step predicted"
    for step in found.steps:
        parts = ", ".join(f"{part} {format_us(us)}" for part, us in step.parts.items())
        bound = "" if step.bound is None else f", bound {format_objective(step.bound, step.objective)}"
        gap = "" if step.gap is None else f", gap {step.gap:.2%}"
        yield f"<br>{text(step.name)} ({text(step.status)}{bound}{gap}): {text(parts)}"
        if step.loss:
            yield f"<br>the loss is computed {text(step.loss)}"
        for each in step.outputs:
            yield f"<br>returns {text(each)}"
        if step.not_split:
            yield f"<br>{text(step.not_split)}"
    share = found.memory_share
    over = share is not None and share > 1
    against = "" if share is None else f", {share:.0%} of {text(found.limit_name)}, {format_bytes(found.limit_bytes or 0)}"
    parts = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in found.memory.items())
    yield (f'<br><span class="{"over" * over}">peak {format_bytes(found.peak_bytes)}{against}{": does not fit" * over}</span>'
           f'{": " * bool(parts)}{parts}</p>')
    yield table(("axis", "links", "splits", "collectives", "bytes a step", "time a step"), [
        (f"{axis.name}={axis.size}", axis.links, ", ".join(axis.splits), ", ".join(
            f"{kind} {format_us(us)}" for kind, us in sorted(axis.communication.by_kind.items(), key=lambda pair: -pair[1])
            if us and kind != "slice"),
         (format_bytes(axis.communication.bytes), axis.communication.bytes),
         (format_us(axis.communication.us), axis.communication.us))
        for axis in found.axes])


def _modules(step: StepSummary) -> str:
    def row(each: ModuleSummary) -> list[Cell]:
        sent = [total for total in each.communication.values() if total.us]
        return [("" if each.stage is None else str(each.stage), float(-1 if each.stage is None else each.stage)),
                each.name, (f"x{each.count}", float(each.count)), sharding_text(each.sharding, 8),
                (format_us(each.compute_us), each.compute_us),
                (format_us(each.communication_us) if sent else "", each.communication_us),
                (format_count(each.parameter_count), float(each.parameter_count)),
                (format_bytes(each.parameter_bytes), float(each.parameter_bytes)),
                (format_bytes(each.saved_bytes), float(each.saved_bytes))]

    return table(("stage", "module", "runs", "sharding", "compute", "communication", "parameters", "weights a device", "saved"),
                 [row(each) for each in step.modules], sorts=True)


def _blocks(plan: Plan, step: StepSummary, number: int) -> Iterator[str]:
    costly = sorted(step.modules, key=lambda each: -(each.compute_us + each.communication_us))[:MOST_BLOCKS]
    shown: set[str] = set()
    stages: set[int] = set()
    for position, each in enumerate(step.modules):
        if each not in costly or (each.path in shown and each.stage in stages):
            continue
        node = f"g{number}_{position}" if each.stage is None else f"g{number}_stage{each.stage}" * (each.stage not in stages)
        shown.add(each.path)
        if each.stage is not None:
            stages.add(each.stage)
        weights = table(("parameter", "shape", "dtype", "in use", "stored", "placements", "bytes a device"), [
            (p.name, " x ".join(map(str, p.shape)), p.dtype, _words(p.words), _words(p.stored), ", ".join(p.placements),
             (format_bytes(p.bytes_per_device), float(p.bytes_per_device))) for p in each.parameters])
        yield details(f"{each.name} x{each.count}", drawn(plan, view="block", block=each.name, backward=True) + weights, node)


def _words(words: dict[str, str]) -> str:
    return ", ".join(f"{axis}: {word}" for axis, word in words.items()) or "whole"


def drawn(plan: Plan, identifier: str = "", **options: object) -> str:
    """The picture of a view of the plan; a sentence, or nothing, where Graphviz is missing."""
    drawing = plan.graphviz(**options)  # pyright: ignore[reportArgumentType]
    try:
        return picture(drawing.pipe(format="svg").decode(), identifier)
    except graphviz.ExecutableNotFound:
        return f"<p>{text(NO_DOT)}</p>" if identifier else ""


def _again(found: PlanDescription, command: list[str] | None) -> Iterator[str]:
    if command:
        yield f"<pre>{text(shlex.join(command))}</pre>"
    options = [(name, str(value)) for name, value in found.options.items()]
    yield table(("what", "value"), [("torch", found.torch_version), ("cluster", found.cluster or "unknown"), *options])
    took = ", ".join(f"{phase} {format_us(1e6 * seconds)}" for phase, seconds in found.seconds.items())
    yield f'<p class="quiet">planning took {text(took)}</p>' if took else ""

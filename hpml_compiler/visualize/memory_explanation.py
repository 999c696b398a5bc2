"""Explain the memory of a plan: bytes of a device by part at the peak, saved and recomputed values and their cost."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.schema import ROOT, GraphPlan
from hpml_compiler.visualize.description.peak_places import budget_of, describe_moment, kept_by_part
from hpml_compiler.visualize.formatting import format_bytes, format_us

MOST_NAMES = 10
COUNTED = "simulated from the operations of one rank"
UNDECIDED = "simulated from the plan's operations, with the saved values that torch's partitioner would choose"


def memory_text(plan: PlanContent, peak: Peak) -> str:
    lines = [f"peak memory of a device: {format_bytes(peak.bytes)} ({COUNTED if peak.counted else UNDECIDED})"]
    lines += [f"  {part:<12} {format_bytes(nbytes):>9}" for part, nbytes in peak.parts.items()]
    lines.append(f"  at {describe_moment(peak)}")
    if budget := budget_of(plan):
        left = budget - peak.bytes
        lines.append(f"  the budget is {format_bytes(budget)}: " + (
            f"{format_bytes(left)} left" if left >= 0 else f"exceeded by {format_bytes(-left)}"))
    for graph in plan.step_graphs:
        lines += ["", *_of_graph(graph)]
    return "\n".join(lines)


def memory_json(plan: PlanContent, peak: Peak) -> dict[str, Any]:
    """The memory explanation as plain JSON values, with the names of all saved, offloaded and recomputed values."""
    return {
        "peak_bytes": peak.bytes, "parts": dict(peak.parts), "counted": peak.counted, "budget_bytes": budget_of(plan),
        "at": {"graph": peak.graph, "node": peak.node, "block": peak.block, "phase": peak.phase},
        "graphs": {graph.name: {
            "saved": {name: nbytes for name, (_, nbytes) in saved_values(graph).items()},
            "offloaded": {name: each.bytes * each.layers for kept in kept_by_part(graph).values()
                          for name, each in kept.offloaded.items()},
            "recomputed_s": {name: each.predicted_us * each.layers * 1e-6 for kept in kept_by_part(graph).values()
                             for name, each in kept.again.items()},
        } for graph in plan.step_graphs},
    }


def saved_values(graph: GraphPlan) -> dict[str, tuple[str, int]]:
    """Block and bytes of each saved value, the largest first; a value that represents several layers counts for all of them."""
    if decided := kept_by_part(graph):
        found = {name: (value.block, value.bytes * value.layers) for kept in decided.values()
                 for name, value in kept.saved.items()}
    else:
        found = {}
        for name, operation in graph.operations.items():
            nbytes = sum(size for size, saved in zip(operation.result_bytes, operation.saved) if saved)
            if nbytes and operation.kind != "view":
                found[name] = (operation.block, nbytes * graph.runs(operation))
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def _of_graph(graph: GraphPlan) -> Iterator[str]:
    saved = saved_values(graph)
    yield f"{graph.name} saves {_values(len(saved))}, {format_bytes(sum(size for _, size in saved.values()))}"
    yield from _largest({name: (block, size, format_bytes(size)) for name, (block, size) in saved.items()})
    for name, kept in kept_by_part(graph).items():
        yield from _offloaded(name, kept)
        if kept.budget_bytes is not None:
            yield from _recomputed(name, kept, graph.predicted.step_time_us)


def _offloaded(decided_for: str, kept: CheckpointingPlan) -> Iterator[str]:
    if kept.offloaded:
        values = kept.offloaded.values()
        sizes = {name: (value.block, value.bytes * value.layers) for name, value in kept.offloaded.items()}
        yield (f"{decided_for} offloads {_values(sum(value.layers for value in values))}, "
               f"{format_bytes(sum(nbytes for _, nbytes in sizes.values()))}: "
               f"transfers take {format_us(sum(value.predicted_us * value.layers for value in values))}")
        yield from _largest({name: (block, nbytes, format_bytes(nbytes)) for name, (block, nbytes) in sizes.items()})


def _recomputed(decided_for: str, kept: CheckpointingPlan, step_us: float) -> Iterator[str]:
    if not kept.again:
        yield f"{decided_for} recomputes nothing"
        return
    share = f", {kept.again_us / step_us:.1%} of the step" if step_us else ""
    count = sum(call.layers for call in kept.again.values())
    calls = "1 call" if count == 1 else f"{count} calls"
    yield f"{decided_for} recomputes {calls} of forward in backward: {format_us(kept.again_us)}{share}"
    took = {name: (call.block, call.predicted_us * call.layers) for name, call in kept.again.items()}
    slowest = sorted(took.items(), key=lambda item: -item[1][1])
    yield from _largest({name: (block, us, format_us(us)) for name, (block, us) in slowest})


def _largest(named: Mapping[str, tuple[str, float, str]]) -> Iterator[str]:
    """Lines on the largest values. named: (block, size, text of the size) by name, the largest first."""
    for name, (block, _, text) in list(named.items())[:MOST_NAMES]:
        yield f"  {text:>9}  {name}" + (f"  ({block})" if block and block != ROOT else "")
    if len(named) > MOST_NAMES:
        yield f"  and {len(named) - MOST_NAMES} smaller"


def _values(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"

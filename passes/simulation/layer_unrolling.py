"""Order of the calls of a step in execution, where one listed layer may stand for many.

A listed call that runs r times is spread over r layers. Forward goes through the layers upward, backward downward;
calls listed among a repeated block's operations that belong to no block run once, beside the listed layer.
The layers of a block's class are numbered in the order in which its listed blocks appear, those after the block that stands for
most layers from the end: they are the last layers.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from passes.graph.placement_graph import block_class
from passes.graph.step_phase import BACKWARD, FORWARD, Phase
from passes.simulation.step_graph import StepCall, StepGraph

Group = tuple[str, int]
"""(class of repeated blocks, layer); ("", 0) outside repeated modules."""
OUTSIDE: Group = ("", 0)


@dataclass(frozen=True, slots=True)
class CallInstance:
    """One run of a listed call. position: its index among the runs, in order of execution."""

    call: StepCall
    group: Group
    position: int
    runs: int

    @property
    def layer(self) -> int:
        return self.group[1]


def layer_label(each: CallInstance) -> str:
    """Suffix of the name of a call that runs in several layers."""
    return f" [{each.layer}]" if each.runs > 1 else ""


def unroll_layers(graph: StepGraph) -> dict[Phase, list[CallInstance]]:
    """The call instances of forward and of backward."""
    groups = _groups(graph)
    spans = _spans(graph.calls, groups)
    phases: tuple[Phase, Phase] = (FORWARD, BACKWARD)
    return {phase: _numbered(_ordered([call for call in graph.calls if call.phase == phase], groups, spans))
            for phase in phases}


def _spans(calls: Sequence[StepCall], groups: Mapping[str, Group]) -> dict[str, range]:
    """The layers in which each call of a repeated block runs; of a class of blocks, all layers."""
    inside: dict[str, list[StepCall]] = defaultdict(list)
    for call in calls:
        inside[groups[call.name][0]].append(call)
    found: dict[str, range] = {}
    for kind, own in inside.items():
        index = {call.name: groups[call.name][1] for call in own}
        last, most = max(index.values()), max(call.runs for call in own)
        depth, main = max(most, last + 1), min(index[call.name] for call in own if call.runs == most)
        found[kind] = range(depth)
        for call in own:
            at_end = index[call.name] > main and 2 * call.runs <= depth
            first = depth - 1 - last + index[call.name] if at_end else index[call.name]
            start = max(0, min(first, depth - call.runs))
            found[call.name] = range(start, start + call.runs)
    return found


def _groups(graph: StepGraph) -> dict[str, Group]:
    """Call -> the class of its block, and the block's index among the listed blocks of that class."""
    found: dict[str, Group] = {}
    seen: dict[str, int] = defaultdict(int)
    for call in graph.calls:
        kind = block_class(call.block)
        if call.block not in found and kind != call.block:  # else it is in no list
            found[call.block] = kind, seen[kind]
            seen[kind] += 1
    return {call.name: found.get(call.block, OUTSIDE) for call in graph.calls}


def _ordered(calls: Sequence[StepCall], groups: Mapping[str, Group], spans: Mapping[str, range],
             ) -> list[tuple[StepCall, Group]]:
    """The runs of one phase. A class of blocks with a call that runs more than once is a loop."""
    loops = {groups[call.name][0] for call in calls if call.runs > 1}
    ordered: list[tuple[StepCall, Group]] = []
    done: set[str] = set()
    for index, call in enumerate(calls):
        kind = groups[call.name][0]
        if kind not in loops or (kind == "" and call.runs == 1):
            if call.name not in done:
                ordered.append((call, groups[call.name]))
        elif kind == "":
            ordered += [(call, ("", layer)) for layer in _in_order(range(call.runs), call.phase)]
        elif kind not in done:
            done.add(kind)
            last = max(k for k, each in enumerate(calls) if groups[each.name][0] == kind)
            loop = _loop(calls[index : last + 1], groups, spans, kind, loops)
            done.update(each.name for each, group in loop if group[0] != kind)
            ordered += loop
    return ordered


def _loop(calls: Sequence[StepCall], groups: Mapping[str, Group], spans: Mapping[str, range], kind: str, loops: set[str],
          ) -> list[tuple[StepCall, Group]]:
    """All layers of a class, with the calls between those of the listed layer that run once."""
    inside = {call.name for call in calls if groups[call.name][0] == kind}
    listed = min(groups[name][1] for name in inside)
    found = []
    for layer in _in_order(spans[kind], calls[0].phase):
        for call in calls:
            if call.name in inside:
                if layer in spans[call.name]:
                    found.append((call, (kind, layer)))
            elif layer == listed and groups[call.name][0] not in loops:
                found.append((call, groups[call.name]))
    return found


def _in_order(layers: range, phase: Phase) -> Iterable[int]:
    return reversed(layers) if phase == BACKWARD else layers


def _numbered(ordered: Sequence[tuple[StepCall, Group]]) -> list[CallInstance]:
    totals = Counter(call.name for call, _ in ordered)
    seen: Counter[str] = Counter()
    found = []
    for call, group in ordered:
        found.append(CallInstance(call, group, seen[call.name], totals[call.name]))
        seen[call.name] += 1
    return found


def carried(graph: StepGraph) -> dict[str, str]:
    """Value that the listed layer reads from outside -> the value that the layers above it read instead: the result of the
    previous layer. Matched by phase, block and bytes."""
    outputs: dict[tuple, str] = {}
    inputs: dict[tuple, str] = {}
    for reader in graph.calls:
        for source, _ in reader.reads:
            made = graph.by_name.get(source)
            if made is None or made.block == reader.block or made.phase != reader.phase:
                continue
            if made.runs > 1 and reader.runs == 1:
                outputs.setdefault((made.block, made.phase, made.result_bytes), source)
            if made.runs == 1 and reader.runs > 1:
                inputs.setdefault((reader.block, reader.phase, made.result_bytes), source)
    return {source: outputs[key] for key, source in inputs.items() if key in outputs}

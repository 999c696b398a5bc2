"""Describe one block for people: heavy operators, cheap ones between them merged, and collectives as steps of their own."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hpml_compiler.plans.schema import GraphPlan, OperationPlan, Redistribution
from hpml_compiler.visualize.description.module_classes import ModuleClass, block_path
from hpml_compiler.visualize.description.module_summaries import decided
from hpml_compiler.visualize.description.placement_words import HEAVY_KINDS, Words, parameter_words, uses_of, value_words
from hpml_compiler.visualize.description.saved_values import makers_of, saved_copies, saved_in, saved_results, short_name

HEAVY, CHEAP, COLLECTIVE, OUTSIDE = "heavy", "cheap", "collective", "outside"
MOST_STEPS = 300
RESHAPES = frozenset((
    "view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "clone", "slice", "alias", "select",
    "_to_copy", "convert_element_type", "split", "_unsafe_view", "detach", "getitem", "cat", "full", "scalar_tensor"))
"""Operators that a merged step does not name, as long as it has others."""


@dataclass
class BlockStep:
    """A step of a block, for one microbatch. title: a weight or an operator; words: of its largest result; weight_words: of the
    use of its weight; axis: of a collective; operators: the plan's operations in it. recomputed: in backward."""

    kind: str
    title: str
    words: Words = field(default_factory=dict)
    weight_words: Words = field(default_factory=dict)
    axis: str = ""
    us: float = 0.0
    bytes: float = 0.0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    recomputed: bool = False
    backward: bool = False
    operators: list[str] = field(default_factory=list)


@dataclass
class BlockSummary:
    """The steps of a block by identifier, in order, and its edges. path: the block that stands for equal ones. merged: how many
    operators are in merged steps. left_out, left_out_us: steps that are not shown, the cheapest, and their time.
    saved_bytes, offloaded_bytes: of one microbatch, values that are in no step included."""

    name: str
    microbatches: int
    steps: dict[str, BlockStep]
    edges: dict[tuple[str, str], None]
    merged: int
    left_out: int = 0
    left_out_us: float = 0.0
    path: str = ""
    saved_bytes: int = 0
    offloaded_bytes: int = 0


def block_summary(graph: GraphPlan, each: ModuleClass, backward: bool = False) -> BlockSummary:
    """The block that stands for a class of equal ones."""
    built = _BlockBuilder(graph, each, backward)
    built.build()
    built.remember()
    summary = BlockSummary(each.name, built.microbatches, built.steps, built.edges,
                           sum(len(step.operators) for step in built.steps.values() if step.kind == CHEAP),
                           path=each.blocks[0].path, saved_bytes=built.saved_bytes, offloaded_bytes=built.offloaded_bytes)
    return _smaller(_without_reshapes(summary))


class _BlockBuilder:
    def __init__(self, graph: GraphPlan, each: ModuleClass, backward: bool):
        self.graph, self.each = graph, each
        self.operations = {name: operation for name, operation in each.blocks[0].operations.items()
                           if backward or not operation.backward}
        times = graph.microbatches
        self.microbatches = graph.pipeline.microbatches if graph.pipeline else times.count if times else 1
        self.moves: dict[tuple[str, str], list[Redistribution]] = defaultdict(list)
        for move in graph.redistributions:
            self.moves[move.value, move.consumer].append(move)
        self.shared: dict[str, list[Redistribution]] = defaultdict(list)
        for move in graph.redistributions:
            self.shared[move.value].append(move)
        self.steps: dict[str, BlockStep] = {}
        self.edges: dict[tuple[str, str], None] = {}
        self.weights = self._weights()
        self.uses = uses_of(graph)
        self.sizes: dict[str, int] = {}
        self.home: dict[str, str] = {}
        self.kept = decided(graph, each.stage)
        self.saved_bytes = self.offloaded_bytes = 0

    def _weights(self) -> dict[str, str]:
        """Parameter by the name of each value that is made of it alone, by cheap operators."""
        found = {name: name for name in self.graph.parameters}
        for name, operation in self.operations.items():
            if len(operation.sources) == 1 and operation.sources[0] in found and operation.kind not in HEAVY_KINDS:
                found[name] = found[operation.sources[0]]
        return found

    def build(self) -> None:
        depth: dict[str, int] = {}
        parts: dict[str, str] = {}  # union of cheap operators of one depth that read each other

        def find(name: str) -> str:
            while parts.setdefault(name, name) != name:
                name = parts[name]
            return name

        for name, operation in self.operations.items():
            if name in self.weights:
                continue
            mine = 0
            for source in operation.sources:
                if source in depth:
                    further = self.operations[source].kind in HEAVY_KINDS or bool(self._hops(source, name))
                    mine = max(mine, depth[source] + further)
            depth[name] = mine
            if operation.kind not in HEAVY_KINDS:
                for source in operation.sources:
                    before = self.operations.get(source)
                    if before is not None and depth.get(source) == mine and before.kind not in HEAVY_KINDS and (
                            before.backward == operation.backward and not self._hops(source, name)):
                        parts[find(name)] = find(source)
        for name, operation in self.operations.items():
            if name in depth:
                heavy = operation.kind in HEAVY_KINDS
                self.home[name] = name if heavy else f"merged {find(name)}"
                self._add(name, operation, heavy)
        for name, operation in self.operations.items():
            if name in self.home:
                for position, source in enumerate(operation.sources):
                    self._edge(source, name, position)
        for (value, consumer), moves in self.moves.items():
            if not consumer and value in self.home:  # reductions for the optimizer, and of results
                self._collectives(self.home[value], "", moves)

    def _add(self, name: str, operation: OperationPlan, heavy: bool) -> None:
        short = short_name(operation)
        identifier = self.home[name]
        step = self.steps.get(identifier)
        words = value_words(operation.outputs[0], operation.dims[0] if operation.dims else "", self.graph.mesh) \
            if operation.outputs else {}
        if step is None:
            step = self.steps[identifier] = BlockStep(HEAVY if heavy else CHEAP, "", backward=operation.backward)
        nbytes = sum(operation.result_bytes)
        if nbytes >= self.sizes.get(identifier, 0):  # the words of the largest result
            step.words, self.sizes[identifier] = words, nbytes
        step.us += operation.predicted_us / self.microbatches
        step.operators.append(f"{name}: {operation.op}")
        names = [each for each in step.title.split(", ") if each]
        if heavy:
            weight = next((self.weights[source] for source in operation.sources if source in self.weights), "")
            other = operation.kind + " backward" * operation.backward if operation.kind == "attention" else short.strip("_")
            step.title = self._weight_title(weight) if weight else other
            if weight:
                step.weight_words = parameter_words(self.graph, weight, self.uses)
        elif short not in names:
            step.title = ", ".join([*names, short])
        step.recomputed = step.recomputed or self.kept is not None and name in self.kept.again

    def remember(self) -> None:
        """Add what each step saves and offloads."""
        path = self.each.blocks[0].path
        if self.kept is None:
            own = self.each.blocks[0].operations
            saved = {name: nbytes for name, nbytes in saved_results(self.graph).items() if name in own}
            for name, nbytes in saved.items():
                if name in self.home:
                    self.steps[self.home[name]].saved_bytes += nbytes
            copies = [each for each in saved_copies(self.graph) if each[0].consumer in own]
            for move, nbytes in copies:
                tail, last = self.home.get(move.value, f"outside {move.value}"), move.hops[-1]
                if (step := self.steps.get(f"{tail} {last.collective} {last.axis} ")) is not None:
                    step.saved_bytes += nbytes
            self.saved_bytes = sum(saved.values()) + sum(nbytes for _, nbytes in copies)
            return
        own = [saved_in(values, path) for values in (self.kept.saved, self.kept.offloaded)]
        self.saved_bytes, self.offloaded_bytes = (sum(value.bytes for value in values.values()) for values in own)
        made = {name: (operation, tuple(round(size / self.microbatches) for size in operation.result_bytes))
                for name, operation in self.operations.items() if name in self.home and not operation.backward}
        makers = makers_of({**own[0], **own[1]}, made)
        moved = {self._result_bytes(step): step for step in reversed(self.steps.values())
                 if step.kind == COLLECTIVE and not step.backward}
        for is_saved, values in zip((True, False), own):
            for name, value in values.items():
                maker = makers.get(name)
                step = self.steps[self.home[maker]] if maker else moved.get(value.bytes)
                if step is not None:
                    step.saved_bytes += is_saved * value.bytes
                    step.offloaded_bytes += (not is_saved) * value.bytes

    def _result_bytes(self, step: BlockStep) -> int:
        return round(step.bytes / (self.graph.mesh[step.axis] if step.title.startswith("reduce_scatter") else 1))

    def _weight_title(self, name: str) -> str:
        path = block_path(name.rpartition(".")[0])
        short = name.removeprefix(f"{path}.") if path else name
        return f"{short.removesuffix('.weight')} {' x '.join(map(str, self.graph.parameters[name].shape))}"

    def _hops(self, value: str, consumer: str) -> list[Redistribution]:
        return [move for move in self._moves(value, consumer) if any(hop.bytes for hop in move.hops)]

    def _moves(self, value: str, consumer: str) -> list[Redistribution]:
        """Redistributions between a value and a reader; where several readers share one, the plan names the first of them."""
        if found := self.moves.get((value, consumer)):
            return found
        operation, source = self.graph.operations[consumer], self.graph.operations.get(value)
        wanted = operation.inputs[operation.sources.index(value)] if len(operation.inputs) == len(operation.sources) else ()
        if source is None or not wanted or any(wanted == made for made in source.outputs):
            return []
        return next(([move] for move in self.shared.get(value, ()) if move.target == wanted), [])

    def _edge(self, source: str, name: str, position: int) -> None:
        head = self.home[name]
        if source in self.weights:
            self._gathers(source, name, head)
        elif source in self.home:
            if self.home[source] != head or self._hops(source, name):
                self._collectives(self.home[source], head, self._moves(source, name))
        elif source in self.graph.operations and not (
                self.graph.operations[source].backward and not self.graph.operations[name].backward):
            operation = self.graph.operations[source]
            outside = f"outside {source}"
            module = block_path(operation.block) or "the model"
            dims = operation.dims[0] if operation.dims else ""
            words = value_words(operation.outputs[0] if operation.outputs else (), dims, self.graph.mesh)
            self.steps.setdefault(outside, BlockStep(
                OUTSIDE, f"from {module}", words, bytes=sum(operation.result_bytes) / self.microbatches,
                backward=operation.backward, operators=[source]))
            self._collectives(outside, head, self._moves(source, name))

    def _gathers(self, source: str, name: str, head: str) -> None:
        """Collectives that bring a weight to an operator, at any of the views on its way."""
        while True:
            if moves := self.moves.get((source, name)):
                self._collectives("", head, moves, weight=self.weights[source])
            operation = self.operations.get(source)
            if operation is None:
                return
            source, name = operation.sources[0], source

    def _collectives(self, tail: str, head: str, moves: list[Redistribution], weight: str = "") -> None:
        last = tail
        for hop in (hop for move in moves for hop in move.hops if hop.bytes):
            parts = 1 if weight or not head else self.microbatches
            identifier = f"{tail or weight} {hop.collective} {hop.axis} {'' if tail else head}"
            if identifier not in self.steps:
                what = f" of {weight.rpartition('.')[0].rpartition('.')[2] or weight}" if weight else (
                    " of its gradient" if not head and self._is_gradient(tail) else "")
                self.steps[identifier] = BlockStep(
                    COLLECTIVE, hop.collective + what, axis=hop.axis,
                    us=hop.predicted_us / parts, bytes=hop.bytes / parts,
                    backward=tail in self.steps and self.steps[tail].backward)
            if last not in ("", identifier) and (identifier, last) not in self.edges:
                self.edges[last, identifier] = None
            last = identifier
        if last and head and last != head:
            self.edges[last, head] = None

    def _is_gradient(self, tail: str) -> bool:
        return tail in self.steps and self.steps[tail].backward


def _without_reshapes(summary: BlockSummary) -> BlockSummary:
    """Merged steps that only reshape are passed through, and others named by what they compute."""
    for identifier, step in list(summary.steps.items()):
        if step.kind != CHEAP:
            continue
        names = [name for name in step.title.split(", ") if name not in RESHAPES]
        if names or step.saved_bytes or step.recomputed:
            step.title = shortened_list(names or ["reshape"])
            continue
        before = [tail for tail, head in summary.edges if head == identifier]
        after = [head for tail, head in summary.edges if tail == identifier]
        if len(before) > 1 and len(after) > 1:
            step.title = "reshape"
            continue
        summary.edges = {edge: None for edge in summary.edges if identifier not in edge}
        summary.edges.update({(tail, head): None for tail in before for head in after if tail != head})
        del summary.steps[identifier]
    return summary


def shortened_list(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _smaller(summary: BlockSummary) -> BlockSummary:
    """At most MOST_STEPS steps: the cheapest are passed through, merged ones before heavy ones and collectives."""
    by_cost = sorted(summary.steps, key=lambda name: (summary.steps[name].kind not in (CHEAP, OUTSIDE), summary.steps[name].us))
    for identifier in by_cost[:max(0, len(summary.steps) - MOST_STEPS)]:
        before = [tail for tail, head in summary.edges if head == identifier]
        after = [head for tail, head in summary.edges if tail == identifier]
        summary.edges = {edge: None for edge in summary.edges if identifier not in edge}
        if len(before) * len(after) <= 16:
            summary.edges.update({(tail, head): None for tail in before for head in after if tail != head})
        summary.left_out_us += summary.steps.pop(identifier).us
        summary.left_out += 1
    return summary

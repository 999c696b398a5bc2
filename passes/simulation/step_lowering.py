"""Lower step graphs to a program: forward and backward of each graph, call by call, microbatch by microbatch."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from passes.graph.step_phase import BACKWARD, FORWARD, Phase
from passes.simulation.layer_unrolling import OUTSIDE, CallInstance, Group, layer_label, unroll_layers
from passes.simulation.rank_program import OFFLOAD, RECOMPUTE, RankProgram
from passes.simulation.reduction_buckets import ReductionBuckets
from passes.simulation.step_graph import StepCall, StepGraph, Transfer, TransferHop, storage_of
from passes.simulation.transfer_instances import TransferInstances


def lower_step(graphs: Sequence[StepGraph], microbatches: int = 1, recompute: bool = False) -> RankProgram:
    """The program of a step. microbatches: runs of forward and backward; recompute: repeated blocks run their forward
    again for backward (all of forward if there are none)."""
    made = RankProgram()
    walks = [_MicrobatchedLowering(made, graph, recompute) for graph in graphs]
    for microbatch in range(microbatches):
        for walk in walks:
            walk.forward(microbatch, last=microbatch == microbatches - 1)
        for walk in reversed(walks):
            walk.backward(microbatch, last=microbatch == microbatches - 1)
    for walk in walks:
        walk.close()
    made.optimizer(sum(graph.optimizer_us for graph in graphs))
    return made


class _MicrobatchedLowering:
    """Lowers one graph that may have microbatches of its own: it then runs them all in a row, forward
    and backward of each if its loss is inside."""

    def __init__(self, program: RankProgram, graph: StepGraph, recompute: bool):
        self.count, self.at_once = graph.microbatches, graph.at_once or graph.microbatches == 1
        self.walks = [_GraphLowering(program, graph, recompute) for _ in range(1 if self.at_once else self.count)]

    def forward(self, microbatch: int, last: bool) -> None:
        if self.count == 1:
            self.walks[0].forward(microbatch, last)
        for number in range(self.count if self.count > 1 else 0):
            walk = self.walks[0 if self.at_once else number]
            walk.forward(number, last=number == self.count - 1)
            if self.at_once:
                walk.backward(number, last=number == self.count - 1)

    def backward(self, microbatch: int, last: bool) -> None:
        if self.count == 1:
            self.walks[0].backward(microbatch, last)
        elif not self.at_once:
            for number, walk in enumerate(self.walks):
                walk.backward(number, last=number == self.count - 1)

    def close(self) -> None:
        self.walks[0].close()


class _GraphLowering:
    """Lowers one graph into the program."""

    def __init__(self, program: RankProgram, graph: StepGraph, recompute: bool):
        self.program, self.graph = program, graph
        self.phases = unroll_layers(graph)
        self.legs = TransferInstances(graph)
        self.recomputed: dict[Group, list[CallInstance]] = defaultdict(list)
        if recompute:
            blocks = [each for each in self.phases[FORWARD] if each.group != OUTSIDE]
            for each in blocks or self.phases[FORWARD]:
                self.recomputed[each.group if blocks else OUTSIDE].append(each)
        self.again = {(each.call.name, each.layer): replace(each, call=replace(each.call, us=each.call.again_us))
                      for each in self.phases[FORWARD] if each.call.again_us is not None}
        self.away = {(each.call.name, each.layer): each for each in self.phases[FORWARD] if each.call.offload_us}
        self.storage = {call.name: storage_of(call.name, graph.by_name) for call in graph.calls}
        self.buckets = ReductionBuckets(program, self._after_bucket)
        self.microbatch, self.last = 0, True
        self.returned: list[int | None] = []  # last entries of the transfers of a phase's outputs

    def forward(self, microbatch: int, last: bool) -> None:
        self.microbatch, self.last = microbatch, last
        self.made: dict[tuple[str, int], int | None] = {}
        self.latest: dict[str, int | None] = {}
        self.copied: dict[tuple[str, int, Hashable], int] = {}  # entry of the transfer that made each copy
        self.program.compute(f"call {self.graph.name}", FORWARD, self.graph.call_us)
        self._run(self.phases[FORWARD], FORWARD)
        self._wait_for_returned()

    def backward(self, microbatch: int, last: bool) -> None:
        """last: gradients are reduced after this microbatch."""
        if self.graph.training:
            self.program.compute(f"call {self.graph.name}", BACKWARD, self.graph.call_us)
        self.microbatch, self.brought = microbatch, set[tuple[str, int]]()
        phase = self.phases[BACKWARD]
        rest = {each.group: self.graph.again_us.get(each.group[0], 0.0) for each in phase}
        waiting = dict(self.recomputed) if phase else {}
        for each in phase:
            group = each.group if each.group in waiting else OUTSIDE if OUTSIDE in waiting else None
            if group is not None:
                self._run(waiting.pop(group), RECOMPUTE)
            if us := rest.pop(each.group, 0.0):
                self._enter(each.group, BACKWARD)
                self.program.compute(f"{RECOMPUTE}{layer_label(each)}", RECOMPUTE, us)
            self._bring(each)
            self._run_one(each, BACKWARD, last)
        for each in self.again.values() if phase else ():  # read by calls that the plan does not list
            self._recompute(each)
        for each in self.away.values() if phase else ():  # read by calls that the plan does not list
            self._copy_back(each)
        if microbatch and phase:
            self.program.compute("accumulate gradients", BACKWARD, self.graph.accumulate_us)
        self._wait_for_returned()
        self.buckets.flush()  # but for the last microbatch, empty unless each of them reduces

    def close(self) -> None:
        """Transfers without a waiting call in the graph: the optimizer waits for them."""
        for leg in self.legs.loose:
            for _ in range(leg.multiplicity):
                self._hops(leg.hops, leg.value, [None])

    # --- one instance ---------------------------------------------------------------------------------------------

    def _run(self, instances: Sequence[CallInstance], phase: str) -> None:
        for each in instances:
            self._run_one(each, phase, False)

    def _bring(self, each: CallInstance) -> None:
        """Recompute the operands that forward has dropped, and their dropped operands."""
        for source, _ in each.call.reads:
            name = self.storage.get(source, source)
            away = self.away.get((name, each.layer), self.away.get((name, 0)))
            if away is not None:
                self._copy_back(away)
            made = self.again.get((name, each.layer), self.again.get((name, 0)))
            if made is not None:
                self._recompute(made)

    def _recompute(self, each: CallInstance) -> None:
        key = each.call.name, each.layer
        if key not in self.brought:
            self.brought.add(key)
            self._bring(each)
            self._run_one(each, RECOMPUTE, False)

    def _copy_back(self, each: CallInstance) -> None:
        """The second half of moving an offloaded result, in front of its first reader in backward."""
        key = f"{OFFLOAD} {each.call.name}", each.layer
        if key not in self.brought and self._is_now(each.call):
            self.brought.add(key)
            self.program.compute(f"copy {each.call.name}{layer_label(each)} back", OFFLOAD, each.call.offload_us / 2)

    def _run_one(self, each: CallInstance, phase: str, reduce: bool) -> None:
        program, call, label = self.program, each.call, each.call.name + layer_label(each)
        if not self._is_now(call):
            return
        self._enter(each.group, phase)
        into = [(leg, repeats) for leg, repeats in self.legs.into(each)
                if not (leg.once and self.microbatch) and (phase != RECOMPUTE or self._comes_again(leg, call))]
        for leg, repeats in into:
            if leg.value != call.name:
                self._leg_in(leg, repeats, each, phase)
        for source, _ in call.reads:
            program.wait(self.made.get((source, each.layer), self.latest.get(source)))
        index = program.compute(label, phase, call.us, kernel=call.kernel)
        self._set_made(each, index)
        if call.offload_us and phase == FORWARD:
            program.compute(f"copy {label} to the host", OFFLOAD, call.offload_us / 2)
        for leg, repeats in into:
            if leg.value == call.name:  # a sum reduced where it is computed
                for _ in range(repeats):
                    index = self._hops(leg.hops, label, [index])
                self._set_made(each, index)
        for leg, repeats in self.legs.out_of(each):
            for _ in range(repeats):
                if not leg.gradient:
                    self.returned.append(self._hops(leg.hops, label, [index]))
                elif reduce or leg.each:
                    self._reduce(leg, 0, index, each.layer, label)

    def _enter(self, group: Group, phase: str) -> None:
        self.program.enter((phase, group, self.microbatch) if group != OUTSIDE else (phase, self.microbatch))

    def _is_now(self, call: StepCall) -> bool:
        """False for a call outside of the loop over microbatches, but with the first or with the last of them."""
        return not (call.when == "before" and self.microbatch or call.when == "after" and not self.last)

    def _comes_again(self, leg: Transfer, reader: StepCall) -> bool:
        """True if an operand is redistributed again when its reader is recomputed: unless it is saved in the layout that is
        read."""
        made = self.graph.by_name.get(leg.value)
        return reader.again_us is None or made is None or made is reader or made.again_us is not None

    def _wait_for_returned(self) -> None:
        """Outputs of a phase are waited for when it ends."""
        for index in self.returned:
            self.program.wait(index)
        self.returned.clear()

    def _leg_in(self, leg: Transfer, repeats: int, each: CallInstance, phase: str) -> None:
        """Run a transfer before its reader; it starts where its value is ready."""
        made = self.graph.by_name.get(leg.value)
        here: Phase = BACKWARD if phase == BACKWARD else FORWARD
        ready = self.made.get((leg.value, each.layer), self.latest.get(leg.value)) if (
            made is not None and made.phase == here) else self.program.prefetch_after()
        earlier = self.copied.get((leg.value, each.layer, leg.source))
        index: int | None = None
        for _ in range(repeats):
            index = self._hops(leg.hops, leg.value + layer_label(each), [ready if index is None else index, earlier])
        if index is not None:
            self.copied[leg.value, each.layer, leg.target] = index
            self.program.wait(index)

    def _hops(self, hops: Sequence[TransferHop], label: str, after: list[int | None]) -> int | None:
        """Collectives one after another; local steps on the compute stream. Returns the last entry's index."""
        index: int | None = None
        for hop in hops:
            before = after if index is None else [index]
            if hop.bytes:
                index = self.program.communicate(label, hop.collective, hop.us, before, hop.link_j)
            else:
                index = self.program.compute(label, hop.collective, hop.us, [
                    each for b in before for each in self.program.collective(b)])
        return index

    def _set_made(self, each: CallInstance, index: int | None) -> None:
        self.made[each.call.name, each.layer] = self.latest[each.call.name] = index

    # --- gradients --------------------------------------------------------------------------------------------------

    def _reduce(self, leg: Transfer, k: int, ready: int | None, layer: int, label: str) -> None:
        """The collectives of a gradient's reduction from k on: into a bucket, or at once where buckets do not apply."""
        if k < len(leg.hops) and self.buckets.takes(leg.hops[k]):
            self.buckets.add(leg, k, ready, layer, label)
        elif k < len(leg.hops):
            self._hops(leg.hops[k:], label, [ready])

    def _after_bucket(self, leg: Transfer, k: int, index: int, layer: int, label: str) -> None:
        self._reduce(leg, k + 1, index, layer, label)

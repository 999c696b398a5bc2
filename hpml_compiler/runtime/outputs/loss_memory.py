"""Memory of what a script does with the outputs of one compiled graph, up to the loss that backward starts from.

In the first call of the graph, what the script computes from its outputs is noted while it is computed. From the second on, the
graph waits for these calls, and runs with them as one graph, the loss inside. A call that was not seen before ends the waiting:
the graph runs alone, and the new calls are noted. All ranks agree on what they have noted before the next call.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.batch.batch_shard import BatchShard
from hpml_compiler.runtime.consistency.initial_sync import generator_states
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.outputs.call_keys import Ref, refs_in
from hpml_compiler.runtime.outputs.call_modes import is_unread
from hpml_compiler.runtime.outputs.deferred_output import DeferredOutput
from hpml_compiler.runtime.outputs.output_wrapper import OutputUse, OutputUses
from hpml_compiler.runtime.outputs.record import AllRecords
from hpml_compiler.runtime.outputs.recorded_call import RecordedCall, RecordedValue
from hpml_compiler.runtime.outputs.recorded_output import recordable_now
from hpml_compiler.runtime.process.world_group import from_all_ranks
from passes import compat
from passes.errors import Infeasible
from passes.session_state import state_of

log = logging.getLogger("hpml")
MOST_LOSSES, MOST_FAILURES = 4, 3
"""Losses that are compiled with one graph, and failures, above the successes, after which its outputs are noted no more."""
TAKEN = "a compiled function takes an output of it"
_KINDS = frozenset((torch.Tensor, torch.nn.Parameter, PlacedTensor, BatchShard))
Call = Callable[..., Any]


@dataclass(frozen=True)
class KnownLoss:
    """A loss that backward started from. number: among the values of its record. kept: of other values that the script held
    when it was computed, on any rank."""

    number: int
    kept: tuple[int, ...]


class NotedCalls(Protocol):
    """The calls of a step that were noted. at: the last. values: of all. inputs: by number, with the `versions` that they had.
    reads: results that the script read, and how many values there were then. held: values that it held when a scalar was
    computed. states: of the generators of random numbers after the graph ran."""

    at: RecordedCall
    values: list[RecordedValue]
    inputs: dict[int, Any]
    versions: dict[int, int]
    reads: list[tuple[int, int]]
    held: dict[int, tuple[int, ...]]
    states: list[torch.Tensor]


class LossMemories(list["LossMemory"]):
    """Those of all graphs, in the order in which they were compiled."""

    is_of_models = True


class TakenOutputs(set[Hashable]):
    """Kinds of graphs of which a compiled function takes an output, and the functions that do. Graphs that are both are of
    blocks that are compiled one by one: those of the next blocks do not wait."""

    is_of_models = True


class OpenCalls:
    """The outputs of the last call of a graph while they are noted, or not computed yet."""

    latest: Any = None

    def settle(self, what: str) -> None:
        """Compute them before something that must come after them."""
        if self.latest is not None:
            self.latest.settle(what)


class LossMemory:
    """One compiled graph's memory. run: calls the graph alone. leaf: the same, as a node of other graphs. compile_: compiles a
    graph that contains it.

    losses: by the call that computes them. refused: calls after which the script needed gradients at other values, too.
    leading: calls on the way to a loss. parts: names of the graph and of those for the script's calls; wholes: of the graphs
    that run instead of these, with the loss, the latest last. stopped: reason why the graph waits no more. uses: of the results
    in the script, by number. chunks: number of chunks that the script asks for, 1 if it does not. refusal: the error by which
    the graph alone needs more than the memory budget. kind: the function that the graph is of, and the shapes of its results.
    sharded: numbers of its results that stay sharded.
    """

    def __init__(self, name: str, run: Call, leaf: Call, compile_: Callable[[torch.fx.GraphModule], Call],
                 wholes: list[str], chunks: int = 1, refusal: Infeasible | None = None, kind: Hashable = None) -> None:
        self.refusal, self.kind, self.sharded = refusal, kind, frozenset[int]()
        self.name, self.run, self.leaf, self.compile, self.chunks = name, run, leaf, compile_, chunks
        self.uses: dict[int, OutputUse] = {}
        self.parts, self.wholes = [name], wholes
        self.failures = self.successes = 0
        self.first: RecordedCall | None = None
        self.values: tuple[RecordedValue, ...] = ()
        self.losses: dict[RecordedCall, KnownLoss] = {}
        self.refused: set[RecordedCall] = set()
        self.leading: set[RecordedCall] = set()
        self.noted: tuple[RecordedCall, KnownLoss] | str | None = None
        self.to_agree, self.draws = False, False
        self.stopped = ""
        state_of(LossMemories).append(self)

    def note(self, found: tuple[RecordedCall, KnownLoss] | str) -> None:
        """Note a loss, or the reason why there is none."""
        self.noted = found

    def stop(self, reason: str, refusal: Infeasible | None = None) -> None:
        """Wait no more. refusal: the error by which the graph with its loss needs more than the memory budget."""
        if reason == TAKEN:
            state_of(TakenOutputs).update((self.kind, compat.frame_being_compiled()))
        if not self.stopped:
            self.stopped = reason
            self.losses.clear()
            self._lead()
            if self.refusal is not None:
                least = refusal or self.refusal
                error = Infeasible(f"{self.described()}; without it, {self.refusal.what}", least.where,
                                   f"let the model return its loss, or {least.next_step}")
                error.smallest_budget_bytes = least.smallest_budget_bytes
                raise error
            log.info("%s", self.described())
            if self.chunks > 1:
                log.warning("the loss is not computed in chunks: %s", self.described())

    def described(self) -> str:
        """A line for reports; "" before anything is known."""
        if self.losses:
            names = ", ".join(call.name() for call in self.losses)
            return f"{self.name}: the script's loss ({names}) is part of the step"
        return f"{self.name}: the script's loss is not part of the step: {self.stopped}" if self.stopped else ""

    def agree(self) -> None:
        """Compare what the ranks noted in the last call."""
        self.to_agree, noted, self.noted = False, self.noted, None
        names = [call.name() for call in noted[0].path()] if isinstance(noted, tuple) else []
        mine = (names, noted[1] if isinstance(noted, tuple) else None, noted if isinstance(noted, str) else "")
        found: list[tuple[list[str], Any, str]] = from_all_ranks(mine)
        reason = next((reason for _, loss, reason in found if loss is None), None)
        if reason is None and any(each != names or loss.number != found[0][1].number for each, loss, _ in found):
            reason = "the ranks compute different losses"
        if reason is not None or not isinstance(noted, tuple):
            self.fail(reason or "backward did not start from a result of its outputs")
            return
        call, loss = noted
        if call in self.refused or len(self.losses) >= MOST_LOSSES:
            self.fail("gradients arrive at its other outputs, too" if call in self.refused else "its loss changes too often")
            return
        self.successes += 1
        self.losses[call] = KnownLoss(loss.number, tuple(sorted({k for _, each, _ in found for k in each.kept})))
        self._lead()
        log.info("%s, from this call on", self.described())

    def fail(self, reason: str) -> None:
        self.failures += 1
        if self.failures >= MOST_FAILURES + self.successes:
            self.stop(reason)

    def refuse(self, call: RecordedCall) -> None:
        """Note that gradients were needed elsewhere after a loss was computed."""
        self.refused.add(call)
        self.forget(call)

    def forget(self, call: RecordedCall) -> None:
        """Forget a loss, so that it is noted again."""
        self.losses.pop(call, None)
        self._lead()

    def _lead(self) -> None:
        self.leading = {each for call in self.losses for each in call.path()}

    def noted_from(self, calls: NotedCalls, number: int) -> str:
        """Note the loss of the calls, of which backward starts from a result. Returns the reason why there is none, or ""."""
        values, chain = calls.values, [number]

        def made_of(number: int) -> list[int]:
            call = calls.at.maker(number)
            return [] if call is self.first else list(dict.fromkeys(
                ref.index for ref in refs_in((call.args, call.kwargs)) if not values[ref.index].is_input))

        while len(operands := made_of(chain[-1])) == 1 and _is_loss(values[operands[0]].fake):
            chain.append(operands[0])
        loss, call = chain[-1], calls.at.maker(chain[-1])
        if not _is_loss(values[loss].fake) or call is self.first or not call.nest.is_leaf():
            return "backward starts from something else than a loss"
        if any(k not in chain and count <= loss for k, count in calls.reads):
            return "the script reads an output before its loss"
        if self.draws and not all(map(torch.equal, calls.states, generator_states())):
            return "random numbers are drawn between its call and its loss"
        needed = {ref.index for each in call.path() for ref in refs_in((each.args, each.kwargs))} & calls.inputs.keys()
        if any(version_of(calls.inputs[k]) != calls.versions[k] for k in needed):
            return "an input or parameter is changed in place between its call and its loss"
        if any(is_unread(x) or x.requires_grad and not x.is_leaf for x in map(calls.inputs.__getitem__, needed)):
            return "its loss depends on outputs of other graphs"
        self.noted = call, KnownLoss(loss, tuple(k for k in calls.held.get(loss, ()) if k not in chain))
        return ""

    def can_wait(self, args: Sequence[Any]) -> bool:
        """True if a call with these arguments, now, may run later."""
        if self.stopped or not torch.is_grad_enabled() or not all(type(x) in _KINDS for x in args):
            return False
        return recordable_now()

    def look(self, args: Sequence[Any]) -> Sequence[Any]:
        """The results of the first call, which shows what the graph returns and does."""
        versions, before = [version_of(x) for x in args], generator_states()
        results = self.run(*args)
        mine = _obstacle(args, versions, results)
        if reason := next(filter(None, from_all_ranks(mine)), ""):  # a rank sees those of its own stages
            self.stop(reason)
            return results
        fakes, count, known = state_of(AllRecords).fakes, len(args), state_of(OutputUses)
        self.uses = {count + k: known.of(self.name, k, f"of shape {tuple(x.shape)}") for k, x in enumerate(results)}
        self.sharded = frozenset(k for k, x in enumerate(results, count) if isinstance(x, LazyOutput))
        self.note_call()
        self._note_outputs(results)
        self.values = tuple(RecordedValue(fakes.like(x), k, k < count) for k, x in enumerate((*args, *results)))
        numbers = tuple(range(count, len(self.values)))
        root = RecordedCall()
        self.first = RecordedCall(root, self.run_alone, self.leaf, tuple(map(Ref, range(count))), {}, self.values, numbers,
                                  frozenset(numbers), compat.pytree.tree_flatten([0] * len(numbers))[1])
        self.draws, self.to_agree = not all(map(torch.equal, before, generator_states())), True
        return results

    def note_call(self) -> None:
        for use in self.uses.values():
            use.calls += 1

    def note_reads(self, numbers: Sequence[int]) -> None:
        for k in self.uses.keys() & numbers:
            self.uses[k].note_read()

    def note_returned(self, values: Mapping[int, Any]) -> None:
        """Count results that are returned beside the loss, and not deferred."""
        for k in values.keys() & self.uses.keys():
            self.uses[k].made += not isinstance(values[k], DeferredOutput)

    def run_alone(self, *args: Any) -> list[Any]:
        """The results of the graph without the script's calls."""
        results = list(self.run(*args))
        self._note_outputs(results)
        return results

    def _note_outputs(self, results: Sequence[Any]) -> None:
        for x, use in zip(results, self.uses.values(), strict=True):
            if isinstance(x, LazyOutput):
                vars(x)["shared"].maker = self
            else:
                use.made += 1


def _obstacle(args: Sequence[Any], versions: Sequence[int], results: Sequence[Any]) -> str:
    """Reason why a graph that took `args`, of these versions, and gave `results` cannot wait; "" if there is none."""
    if [version_of(x) for x in args] != versions:
        return "it changes an input or a buffer in place"
    if not all(isinstance(x, torch.Tensor) and x.layout is torch.strided for x in results):
        return "it returns something else than tensors"
    with compat.plain_torch_functions():
        memory = [_memory(x) for x in (*args, *results)]
    if len({*memory[len(args):]}) < len(results) or not set(memory[:len(args)]).isdisjoint(memory[len(args):]):
        return "outputs of it share memory with others, or with an input"
    return "" if any(x.requires_grad for x in results) else "no output of it has a gradient"


def _is_loss(fake: torch.Tensor) -> bool:
    return fake.dim() == 0 and fake.is_floating_point() and fake.requires_grad


def version_of(tensor: Any) -> int:
    """Version of the values that a tensor has. An optimizer changes the local part of a parameter, not its wrapper."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor)._version


def was_freed(tensor: Any) -> bool:
    """True if the memory of a tensor was given back by hand, which its version does not tell."""
    with compat.plain_torch_functions():
        plain = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return plain.numel() > 0 and not plain.untyped_storage().nbytes()


def _memory(tensor: Any) -> int:
    part = vars(tensor).get("part", tensor._local_tensor) if isinstance(tensor, LazyOutput) else (
        tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    return compat.storage_key(part)

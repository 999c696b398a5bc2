"""Calls of one step on the outputs of a compiled graph, up to the loss: noted, or waited for.

While they are noted, each is made at once, on the outputs as they come. While the graph waits, nothing runs until the call that
computes the loss: then all of it runs as one graph. Results beside the loss have no gradient there; what asks for one runs the
graph once more, alone.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpml_compiler.runtime.consistency.initial_sync import drawing_as, generator_states
from hpml_compiler.runtime.outputs.call_keys import fill, refs_in, values_key
from hpml_compiler.runtime.outputs.call_modes import Modes, nbytes
from hpml_compiler.runtime.outputs.kept_inputs import refusing_gradients, watch_changes
from hpml_compiler.runtime.outputs.loss_memory import TAKEN, KnownLoss, LossMemory, OpenCalls, version_of, was_freed
from hpml_compiler.runtime.outputs.record import ALONE, COPIED_BYTES, AllRecords, CallRecord
from hpml_compiler.runtime.outputs.recorded_call import RecordedCall
from hpml_compiler.runtime.outputs.recorded_output import plain
from hpml_compiler.runtime.watchdog.barrier_check import require_all_ranks
from passes import compat
from passes.errors import HpmlError
from passes.session_state import state_of


class StepCalls(CallRecord):
    """The calls after one call of a graph. known: values that were computed, by number; None while the graph waits. loss: the
    call that computed the loss, with which known values have no gradient. results: of the graph, if it has run. unnoted:
    why no loss follows."""

    def __init__(self, memory: LossMemory, first: RecordedCall, args: Sequence[Any],
                 results: Sequence[Any] | None = None) -> None:
        super().__init__(first, Modes(memory.values[-1].fake.device.type), "", state_of(AllRecords).fakes)
        self.memory, self.values = memory, list(memory.values)
        self.inputs = dict(enumerate(args))
        self._numbers = {values_key(x): k for k, x in self.inputs.items()}
        self.versions: dict[int, int] = {}
        self.known: dict[int, Any] | None = None if results is None else dict(zip(first.results, results, strict=True))
        self.loss: RecordedCall | None = None
        self.is_closed, self.unnoted = False, ""
        self.states = generator_states() if memory.draws else []
        self.reads: list[tuple[int, int]] = []  # results, and how many values there were when one was read
        self.held: dict[int, tuple[int, ...]] = {}  # values that the script held when a scalar was computed
        self._unheld: int | None = None
        state_of(AllRecords).living.add(self)
        state_of(OpenCalls).latest = self
        watch_changes(self)
        self._keep_inputs()

    def outputs(self, stand_in: Callable[[CallRecord, int], Any]) -> list[Any]:
        """The graph's results, for the script."""
        return [self._stand_in(k, stand_in) for k in self.at.results]

    def _stand_in(self, number: int, stand_in: Callable[[CallRecord, int], Any]) -> Any:
        made = stand_in(self, number)
        self._living[number] = weakref.ref(made)
        return made

    # -- what changes meanwhile ----------------------------------------------------------------------------------------

    def copy(self) -> None:
        """Called before an optimizer's step."""
        if self.known is None:
            self.settle("the optimizer's step")
        elif self.loss is not None and not self.known.keys() >= {*self.alive}:
            self.memory.forget(self.loss)  # the script holds more than in the step in which its loss was noted
            self.again()

    def note_data(self, parameter: torch.Tensor) -> None:
        """Called before a use of a parameter's `.data`."""
        if self.known is None and any(x is parameter for x in self.inputs.values()):
            self.settle("the use of a parameter's .data")

    def settle(self, what: str) -> None:
        """Compute, as they are called, the results that the script holds. what: before which that is needed."""
        if self.is_busy or self.is_closed or self.loss is not None:
            return
        if self.known is None and (self.alive or self.memory.draws):
            self.learn(what)
        self.close(self.unnoted or f"{what} comes before its loss")

    def uses(self, shared: Any) -> bool:
        return self.known is None and super().uses(shared)

    def read_all(self) -> None:
        if self.loss is None:
            self.settle("a change in place")

    def release(self) -> None:
        pass

    def _keep_inputs(self) -> None:
        for k, x in self.inputs.items():
            if k in self.versions:
                continue
            self.versions[k] = version_of(x)
            if type(x) is torch.Tensor and not x.requires_grad and nbytes(x) <= COPIED_BYTES and self.known is None:
                with torch.no_grad(), torch.inference_mode(False):
                    self._kept[k] = x.clone()

    def _argument(self, number: int) -> Any:
        tensor, kept = self.inputs[number], self._kept.get(number)
        if kept is not None:
            return kept
        changed = version_of(tensor) != self.versions.get(number, version_of(tensor))
        if changed or was_freed(tensor):
            how, verb = ("changed in place", "change") if changed else ("freed", "free")
            raise HpmlError(f"an output of the compiled model cannot be computed any more: an input or parameter was {how} "
                            "since the model was called", f"an input of shape {tuple(tensor.shape)}",
                            f'{verb} it after the loss is computed, or set outputs="whole"')
        return tensor

    # -- computing -----------------------------------------------------------------------------------------------------

    def learn(self, what: str) -> None:
        """Run the graph alone, and the calls so far; note those that follow, which are made as they come."""
        if what:
            require_all_ranks(f"reading an output of {self.memory.name} in {what}", ALONE, every=0)
        self._check_draws()
        self.memory.to_agree, self.memory.noted = True, None
        before = generator_states()
        self.known = self._values_alone()
        self._kept.clear()
        self.states = generator_states()
        self.memory.draws |= not all(map(torch.equal, before, self.states))

    def _values_alone(self) -> dict[int, Any]:
        busy, self.is_busy = self.is_busy, True
        known: dict[int, Any] = {}
        try:
            for call in self.at.path():
                known.update(self._made(call, lambda k: known[k] if k in known else self._argument(k)))
        except BaseException:
            self.is_closed = True
            raise
        finally:
            self.is_busy = busy
        return known

    def _made(self, call: RecordedCall, value: Callable[[int], Any]) -> dict[int, Any]:
        with compat.outside_transforms(), self.modes.again():
            made = call.func(*fill(call.args, value), **fill(call.kwargs, value))
        return dict(zip(call.results, compat.pytree.tree_leaves(made), strict=True))

    def _check_draws(self) -> None:
        if all(torch.equal(*pair) for pair in zip(self.states, generator_states(), strict=bool(self.states))):
            return
        if self.alive:
            raise HpmlError("random numbers were drawn between a call of the model, which draws some, too, and its loss, as in "
                            "none of the steps before", self.memory.name,
                            'draw them before the model is called, or set outputs="whole"')

    def add(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any],
            stand_in: Callable[[CallRecord, int], Any]) -> Any:
        self._note_held()
        return super().add(func, args, kwargs, stand_in)

    def _results(self, call: RecordedCall, operands: Mapping[int, Any], stand_in: Callable[[CallRecord, int], Any]) -> Any:
        loss = self.memory.losses.get(call)
        if self.known is None and loss is not None:
            found = self._in_step(call, loss)
            if found is not None:
                return found
        elif self.known is None and call not in self.memory.leading:
            self.learn(call.name())
        elif self.known is not None:
            needed = [ref.index for ref in refs_in((call.args, call.kwargs))]
            if self.loss is not None and any(not self.values[k].is_input and k not in self.known for k in needed):
                self.value_for(call.name(), ())
                return call.func(*fill(call.args, lambda k: plain(operands[k])),
                                 **fill(call.kwargs, lambda k: plain(operands[k])))
            if self.loss is not None and call.name() != "detach":
                self.memory.note_reads(needed)
            known = self.known
            known.update(self._made(call, lambda k: known[k] if k in known else operands[k]))
        results = dict(operands)
        for k in dict.fromkeys(call.results):
            if k in operands:
                continue
            fake = self.values[k].fake
            if self.loss is not None and self.known is not None and not fake.requires_grad:
                results[k] = self.known.pop(k)
                continue
            if fake.dim() == 0:
                self._unheld = k
            results[k] = self._stand_in(k, stand_in)
        return compat.pytree.tree_unflatten([results[k] for k in call.results], call.nest)

    def _note_held(self) -> None:
        """Note what the script holds, once the call that made the last scalar has returned."""
        if self._unheld is not None:
            self.held[self._unheld] = tuple(k for k in self.alive if k != self._unheld)
            self._unheld = None

    def _in_step(self, call: RecordedCall, loss: KnownLoss) -> Any:
        """The loss, computed by one graph with the model; None if that graph cannot be compiled."""
        self._check_draws()
        graph = call.graph((loss.number, *loss.kept), self.values)
        arguments = [self._argument(k) for k in graph.inputs]
        made = None
        with compat.outside_transforms(), self.modes.again():
            made = graph.compiled(arguments, self.memory.compile)
        if made is None:
            self.memory.stop(f"the graph with its loss cannot be compiled ({graph.reason})", graph.refusal)
            self.learn("")
            return None
        self.loss, self.known = call, dict(zip(loss.kept, made[1:], strict=True))
        self.memory.note_returned(self.known)
        self._kept.clear()
        state_of(OpenCalls).latest = None
        return made[0]

    def again(self) -> None:
        """After the loss, run the graph alone for what has a gradient. Raises HpmlError if an input has changed."""
        assert self.loss is not None
        for k in self.inputs:
            self._argument(k)
        require_all_ranks(f"running {self.memory.name} again", ALONE, every=0)
        with drawing_as(self.states):
            self.known = self._values_alone()
        self._finish()

    def close(self, why: str) -> None:
        """Hand over what was computed. why: reason why no loss is known, "" if there is one."""
        if why:
            self.memory.note(why)
        self._finish()

    def _finish(self) -> None:
        self.is_closed = True
        opened = state_of(OpenCalls)
        if opened.latest is self:
            opened.latest = None
        state_of(AllRecords).living.discard(self)
        known, self.known = self.known or {}, {}
        self.inputs, self._kept = {}, {}
        held = {id(x) for record in state_of(AllRecords).living for x in record.inputs.values()}
        for number in self.alive:
            tensor = self._living.pop(number)()
            if tensor is not None:
                tensor.become(known[number], exchange=id(known[number]) not in held)

    # -- calls that are not noted --------------------------------------------------------------------------------------

    def stop(self, number: int) -> None:
        self.memory.stop(TAKEN)

    def read(self, number: int, as_today: bool = False) -> None:
        self.value_for("a read of an output", ())

    def read_between(self, number: int, what: str) -> None:
        if self.loss is not None:
            raise HpmlError(f"{what} on an output of the model after its loss was computed: its gradient does not pass through "
                            "this one any more", f"a tensor of shape {tuple(self.values[number].fake.shape)}",
                            'do this before the loss, or set outputs="whole"')
        self.value_for(what, ())

    def value_for(self, what: str, numbers: Sequence[int]) -> None:
        """Compute results for a call that is not noted. numbers: of those that it only reads; none: all are handed over."""
        if self.is_closed:
            return
        if self.loss is None:
            if self.known is None:
                self.learn(what)
            self.reads += [(k, len(self.values)) for k in numbers]
            if not numbers:
                self.close(f"{what} comes before its loss")
            return
        known = self.known or {}
        if numbers and known.keys() >= {*numbers}:
            return
        if all(version_of(x) == self.versions[k] for k, x in self.inputs.items()):
            (self.memory.refuse if known.keys() >= {*self.alive} else self.memory.forget)(self.loss)
            self.again()
            return
        for k in self.alive:
            if k not in known:
                self._argument(next(k for k, x in self.inputs.items() if version_of(x) != self.versions[k]))
            if self.values[k].fake.requires_grad:
                known[k] = refusing_gradients(_copy(known[k]), "an output of the model")
        self._finish()

    def starts_backward(self, number: int) -> None:
        """Note a backward from a result."""
        if self.loss is not None:
            self.memory.refuse(self.loss)
            self.again()
            return
        if self.known is None:
            self.learn("backward")
        self._note_held()
        self.close(self.memory.noted_from(self, number))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().clone()

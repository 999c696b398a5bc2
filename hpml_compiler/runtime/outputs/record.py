"""Record of what a script does with sharded outputs, kept until something needs a value.

Small results, such as losses and metrics, are computed when they are recorded, while all ranks are there: one rank may print
them alone. Large ones, such as log-probabilities on the way to a loss, are computed for what is made of them, and by themselves
only where the script reads them.
"""
from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.outputs.call_keys import NotRecordable, Ref, encode, identity_of, values_key
from hpml_compiler.runtime.outputs.call_modes import Modes, is_unread, nbytes
from hpml_compiler.runtime.outputs.kept_inputs import KeptInputs, refusing_gradients
from hpml_compiler.runtime.outputs.recorded_call import RecordedCall, RecordedValue, compile_calls
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.program.second_derivatives import with_second_derivatives
from hpml_compiler.runtime.watchdog.barrier_check import EVERY_CALLS, require_all_ranks
from passes import compat
from passes.errors import HpmlError
from passes.session_state import state_of

SMALL_BYTES = 64 * 1024
"""Results up to this size are computed at once, and outputs up to it are gathered at their first use."""
COPIED_BYTES = 1024 * 1024
"""Plain arguments up to this size are copied when they are recorded, larger ones are watched for changes."""
GATHERED_BYTES = 64 * 1024 * 1024
"""Up to this size, outputs are gathered where calls without a gradient are seen for the first time."""
ALONE = ("this uses an output of the model that is sharded over all ranks, so all ranks must do it: move it out of "
         "`if rank == 0:`, and print or save the result on rank 0")


class AllRecords:
    """Sequences of calls that were seen, by their modes and options; records with results that the script may still read; and
    the one that calls are added to, by its modes."""

    def __init__(self) -> None:
        self.roots: dict[Hashable, RecordedCall] = {}
        self.living: WeakSet[CallRecord] = WeakSet()
        self.open: dict[Hashable, CallRecord] = {}
        self.fakes = compat.FakeCalls()

    def record_for(self, output: Any) -> CallRecord:
        modes, options = Modes(output.device.type), output.__dict__["shared"].recorder.compile_options
        key = (modes.key, options)
        record = self.open.get(key)
        if record is None or record.is_over or record.thread is not threading.current_thread():
            record = self.open[key] = CallRecord(self.roots.setdefault(key, RecordedCall()), modes, options, self.fakes)
        return record

    def end(self) -> None:
        """Add no more calls to the open records, so that each step begins its own."""
        self.open.clear()


class CallRecord:
    """Calls in one set of modes, until nothing that they made is alive and not computed."""

    def __init__(self, root: RecordedCall, modes: Modes, options: Any, fakes: compat.FakeCalls) -> None:
        self.at, self.modes, self.options, self.fakes = root, modes, options, fakes
        self.thread, self.is_busy = threading.current_thread(), False
        self.values: list[RecordedValue] = []
        self.inputs: dict[int, Any] = {}
        self._living: dict[int, weakref.ref[Any]] = {}
        self._passed: set[int] = set()  # by gradients of results that were computed
        self._numbers: dict[tuple[int, int], int] = {}
        self._kept: dict[int, KeptInputs | torch.Tensor] = {}
        self._copies: WeakValueDictionary[tuple[int, int], torch.Tensor] = WeakValueDictionary()
        self.on_need: dict[int, Callable[[], None]] = {}  # called when a result, or what was made of it, is computed

    @property
    def alive(self) -> list[int]:
        """Numbers of the large results that the script holds and that are not computed, in order."""
        self._living = {k: each for k, each in self._living.items() if each() is not None}
        return sorted(self._living)

    @property
    def is_over(self) -> bool:
        return bool(self.values) and not self.alive

    def takes(self, modes: Modes) -> bool:
        """True if a call in these modes, in this thread, can follow."""
        return modes.key == self.modes.key and self.thread is threading.current_thread()

    def stop(self, number: int) -> None:
        """From the next step on, compute a result when it is called for."""
        self.at.maker(number).reads_at_once = True

    def uses(self, shared: Any) -> bool:
        """True if an output with this state is an input."""
        return any(vars(x).get("shared") is shared for x in self.inputs.values())

    # -- recording -----------------------------------------------------------------------------------------------------

    def add(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any],
            stand_in: Callable[[CallRecord, int], Any]) -> Any:
        """The result of a call; NotImplemented if it cannot be recorded. stand_in: makes the tensor for a large result."""
        new: list[torch.Tensor] = []
        operands: dict[int, Any] = {}

        def ref(tensor: torch.Tensor) -> tuple[Hashable, Ref]:
            key, made = self._ref(tensor, new)
            operands[made.index] = tensor
            return key, made

        try:
            given, (made_args, made_kwargs) = encode((args, kwargs), ref)
        except NotRecordable:
            return NotImplemented
        key = identity_of(func), given
        if key not in self.at.children:
            self.at.children[key] = self.at.after(func, made_args, made_kwargs, self.values, new, self.fakes)
        call = self.at.children[key]
        if call is None:
            return NotImplemented
        for number, tensor in enumerate(new, len(self.values)):
            self.inputs[number] = tensor
            self._numbers[values_key(tensor)] = number
        self.at, self.is_busy = call, True
        self.values += call.added
        try:
            return self._results(call, operands, stand_in)
        finally:
            self.is_busy = False
            self._keep_inputs()

    def _ref(self, tensor: torch.Tensor, new: list[torch.Tensor]) -> tuple[Hashable, Ref]:
        own = tensor.__dict__
        if own.get("record") is self and "value" not in own:
            return own["number"], Ref(own["number"])
        if tensor.is_inference() or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or \
                tensor.is_neg() or not (isinstance(tensor, DTensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter)):
            raise NotRecordable
        number = self._numbers.get(values_key(tensor))
        if number is not None:
            return number, Ref(number)
        place = next((k for k, x in enumerate(new) if x is tensor), len(new))
        if place == len(new):
            new.append(tensor)
        number = len(self.values) + place
        placed = (tensor.placements, hash(tensor.device_mesh)) if isinstance(tensor, DTensor) else None
        return (number, type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
                placed), Ref(number)

    def _results(self, call: RecordedCall, operands: Mapping[int, Any], stand_in: Callable[[CallRecord, int], Any]) -> Any:
        found, at_once = dict(operands), []
        for k in dict.fromkeys(call.results):
            if k in operands:  # the call returned its operand
                continue
            if call.reads_at_once or nbytes(self.values[k].fake) <= SMALL_BYTES and self.values[k].root == k:
                at_once.append(k)
            else:
                found[k] = stand_in(self, k)
                self._living[k] = weakref.ref(found[k], functools.partial(_release, weakref.ref(self)))
                state_of(AllRecords).living.add(self)
        if at_once:
            found |= self._values_of(at_once)
        return compat.pytree.tree_unflatten([found[k] for k in call.results], call.nest)

    def _keep_inputs(self) -> None:
        """Keep plain inputs of what is not computed yet as they are now."""
        alive = self.alive
        if not alive:
            return self.release()
        for k in self.at.graph(alive, self.values).inputs:
            tensor = self.inputs[k]
            if k in self._kept or is_unread(tensor):
                continue
            plain = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if type(tensor) is torch.Tensor and not tensor.requires_grad and nbytes(tensor) <= COPIED_BYTES:
                with torch.no_grad(), torch.inference_mode(False):
                    self._kept[k] = tensor.clone()
            else:
                self._kept[k] = KeptInputs([plain], self._copies, f"the result of {self.at.name()} on an output of the model")

    # -- computing -----------------------------------------------------------------------------------------------------

    def read(self, number: int, as_today: bool = False) -> None:
        """Compute a large result. as_today: by the script's calls on gathered outputs, and all others with it: where the script
        will change it in place, or ask for gradients of what lies between."""
        if as_today or self.values[self.values[number].root].is_input:  # a view of an input
            self.read_all()
            return
        root = self.values[number].root
        together = [k for k in self.alive if self.values[k].root == root]
        if together == [number] == [root]:
            self._become(self._values_of([number]))
        else:  # they share memory
            base = self._values_of([root])[root]
            if root in together or any(self.at.maker(k).name() != "detach" for k in together):
                base = to_full_tensor(base)
            self._become(self._replayed(together, {root: base}))

    def read_all(self) -> None:
        """Compute all that is alive by the script's calls, on gathered outputs."""
        if alive := self.alive:
            self._note_need(alive)
            self._meet(every=0)
            self._become(self._replayed(alive, {}))

    def read_between(self, number: int, what: str) -> None:
        """Compute a result as a place among the gradients. Raises HpmlError if those of a result that was made of it do not
        pass through it."""
        if number in self._passed and self.values[number].fake.requires_grad:
            raise HpmlError(f"{what} on a result of {self.at.maker(number).name()} on an output of the model, of which another"
                            " result was made: its gradient does not pass through this one any more",
                            f"a tensor of shape {tuple(self.values[number].fake.shape)}",
                            'do this right after the call that makes it, or set outputs="whole"')
        self.read_all()

    def _become(self, values: Mapping[int, Any]) -> None:
        for number, value in values.items():
            found = self._living.pop(number, None)
            tensor = None if found is None else found()
            del found
            if tensor is not None:
                tensor.become(value)
        if not self.alive:
            self.release()

    def release(self) -> None:
        """Let go of the inputs, with the graphs that they hang on."""
        self.inputs, self._kept = {}, {}
        state_of(AllRecords).living.discard(self)

    def _note_need(self, numbers: Iterable[int]) -> None:
        for k in self.on_need.keys() & set(numbers):
            self.on_need.pop(k)()

    def _values_of(self, wanted: Sequence[int]) -> dict[int, Any]:
        self._note_need((*wanted, *(graph := self.at.graph(wanted, self.values)).between))
        unread = [x for x in map(self.inputs.__getitem__, graph.inputs) if is_unread(x)]
        gradients = any(self.values[k].fake.requires_grad for k in wanted)
        first, graph.is_known = not graph.is_known, True
        modest = sum(nbytes(x) for x in unread) <= GATHERED_BYTES
        if first and modest and not gradients:
            return self._replayed(wanted, {}, looks=True)
        if not unread or compat.inside_backward():
            return self._replayed(wanted, {})
        self._meet(every=EVERY_CALLS if graph.is_compiled else 0)
        with compat.outside_transforms(), self.modes.again():
            arguments = {k: self._argument(k) for k in graph.inputs}
            made = graph.compiled([*arguments.values()], functools.partial(
                compile_calls, options=self.options, whole=all(nbytes(self.values[k].fake) <= SMALL_BYTES for k in wanted)))
            if gradients and made is not None:
                self._passed |= graph.between
                made = with_second_derivatives(made, arguments, functools.partial(graph.replay, {}), self.modes.again,
                                                PlacedTensor)
        return self._replayed(wanted, {}) if made is None else dict(zip(wanted, made, strict=True))

    def _replayed(self, wanted: Sequence[int], known: dict[int, Any], looks: bool = False) -> dict[int, Any]:
        """Values by the script's calls. looks: outputs stay sharded, since these calls only read them."""
        def gathered(number: int) -> Any:
            x = self._argument(number)
            if looks and is_unread(x):
                return x.looked_at()
            return to_full_tensor(x) if "shared" in vars(x) else x

        with compat.outside_transforms(), self.modes.again():
            return self.at.graph(wanted, self.values).replay(known, gathered)

    def _argument(self, number: int) -> Any:
        """An input with the values that it had when it was recorded. Raises HpmlError if they are gone."""
        tensor, kept = self.inputs[number], self._kept.get(number)
        if not isinstance(kept, KeptInputs):
            return tensor if kept is None else kept
        (value,) = kept.values()
        plain = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        self._kept.pop(number)
        if value is not plain and plain is not tensor:  # as it was before an optimizer's step
            with compat.plain_torch_functions():
                old = compat.make_dtensor(type(tensor), value.detach(), tensor._spec)
                return refusing_gradients(old, f"the result of {self.at.name()}") if tensor.requires_grad else old
        return tensor if value is plain else value

    def _meet(self, every: int) -> None:
        shared = next((x.__dict__["shared"] for x in self.inputs.values() if is_unread(x)), None)
        if shared is None:
            return
        what = f"reading {shared.what} in {self.at.name()}"
        if self.thread is not threading.current_thread() and self.thread.is_alive() and not compat.inside_backward():
            raise HpmlError(f"{what} in another thread than the one that called the model: all ranks take part in it, which "
                            "threads would do at different times", threading.current_thread().name,
                            "use it where the model is called first (as in logits = logits.numpy()), and pass the result on")
        require_all_ranks(what, ALONE, every)


def _release(record: weakref.ref[CallRecord], _: Any) -> None:
    """Let a record go of its inputs when the last result that needs them is gone."""
    found = record()
    if found is not None and not found.is_busy and not found.alive:
        found.release()

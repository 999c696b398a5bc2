"""Inputs that deferred outputs are computed from, kept as they were when the graph was called.

An optimizer changes parameters between the call and the read. Before it can, the outputs that still live take copies: at the
end of the backward through their graph, before an optimizer's step, and before a parameter's `.data` is used. A change in
another way is noticed by torch's version counter, or by a sample of the values, and reading the output raises an error.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpml_compiler.runtime.outputs.recorded_call import CompiledRecords
from passes import compat
from passes.errors import HpmlError
from passes.session_state import state_of

SAMPLES = 1024
AllCopies = WeakValueDictionary[tuple[int, int], torch.Tensor]


class _Living(WeakSet["KeptInputs"]):
    """Inputs of deferred outputs that are alive and not computed."""

    def __init__(self) -> None:
        super().__init__()
        self.hook = register_optimizer_step_pre_hook(_before_step)

    def close(self) -> None:
        self.hook.remove()


def can_be_watched() -> bool:
    """True if writes through a parameter's `.data` are noticed with this torch."""
    return compat.watch_parameter_data(_before_data)


def watch_changes(calls: Any) -> None:
    """Call `copy()` of this object before an optimizer's step, and `note_data(parameter)` before a use of a parameter's
    `.data`, while it lives."""
    can_be_watched()
    state_of(_Living).add(calls)


def _before_step(*_: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiled step runs after backward, at whose end copies were made
        for kept in list(state_of(_Living)):
            kept.copy()


def _before_data(parameter: torch.Tensor) -> None:
    if state_of(_Living) and not state_of(CompiledRecords).are_running:  # then hpml looks at it, not the script
        for kept in list(state_of(_Living)):
            kept.note_data(parameter)


class _KeptInput:
    """An argument of one call, with marks by which a change of its values is noticed.

    all_copies: of a graph's arguments, by argument and version, shared by the calls that have seen the same values.
    """

    def __init__(self, value: torch.Tensor, all_copies: AllCopies) -> None:
        self.value, self._all_copies = value, all_copies
        self.version, self.sample = value._version, sample_of(value)
        self.through_data = False
        self.copied: torch.Tensor | None = None

    def changed(self) -> str | None:
        """Reason why the values are no longer those of the call; None if they are."""
        if self.through_data or self.value._version != self.version:
            return "it was changed in place since"
        if self.value.numel() and not self.value.untyped_storage().nbytes():
            return "its memory was freed"
        if not same_values(self.sample, sample_of(self.value)):
            return "it was changed since, through another tensor over its memory"
        return None

    def copy(self, what: str) -> None:
        """Copy the values if they have not changed yet."""
        if self.copied is None and self.changed() is None:
            key = id(self.value), self.version
            made = self._all_copies.get(key)
            if made is None or not same_values(self.sample, sample_of(made)):
                made = self._all_copies[key] = _copy(self.value, what)
            self.copied = made

    def note_data(self, what: str) -> None:
        self.copy(what)
        self.through_data = True

    def values(self, what: str) -> torch.Tensor:
        """The argument, or the copy where it has changed. Raises HpmlError if there is none."""
        how = self.changed()
        if how is None:
            return self.value
        if self.copied is None:
            raise HpmlError(f"{what} cannot be computed any more: {how}", f"an input of shape {tuple(self.value.shape)}",
                            'read the output before that (as in logits = logits.clone()), or set outputs="whole"')
        return self.copied


class KeptInputs:
    """The arguments of one call that its deferred outputs are computed from. what: the outputs, in messages."""

    def __init__(self, arguments: Sequence[Any], all_copies: AllCopies, what: str) -> None:
        self._what = what
        self._arguments = [_KeptInput(x, all_copies) if isinstance(x, torch.Tensor) else x for x in arguments]
        state_of(_Living).add(self)

    def _inputs(self) -> list[_KeptInput]:
        return [x for x in self._arguments if isinstance(x, _KeptInput)]

    def copy_after_backward(self) -> Callable[..., None]:
        """A hook for the autograd node of the call. It does not keep these inputs alive."""
        living = WeakSet([self])

        def after() -> None:
            for kept in living:
                kept.copy()

        def before(*_: Any) -> None:
            if not torch.compiler.is_compiling():  # compiled autograd traces this: an optimizer's step copies then
                compat.after_backward(after)

        return before

    def copy(self) -> None:
        for each in self._inputs():
            each.copy(self._what)

    def note_data(self, parameter: torch.Tensor) -> None:
        for each in self._inputs():
            if each.value is parameter:
                each.note_data(self._what)

    def values(self) -> list[Any]:
        """The arguments with the values of the call. Raises HpmlError if one has changed and was not copied before."""
        found = [x.values(self._what) if isinstance(x, _KeptInput) else x for x in self._arguments]
        state_of(_Living).discard(self)
        return found


def sample_of(value: torch.Tensor) -> torch.Tensor:
    """Some of the values, evenly spread over the memory. An update by an optimizer changes some of them."""
    with torch.no_grad(), torch.inference_mode(False):
        plain = value.detach()
        step = max(1, plain.numel() // SAMPLES)
        dense = plain.is_contiguous() or plain.numel() == 0
        flat = plain.view(-1) if dense else plain[tuple(slice(0, 8) for _ in plain.shape)].flatten()
        return flat[::step if dense else 1].clone()


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _copy(value: torch.Tensor, what: str) -> torch.Tensor:
    """A copy that raises an error if a gradient arrives: the value it was taken of is gone, as in eager mode."""
    with torch.no_grad(), torch.inference_mode(False):
        made = value.detach().clone()
    return refusing_gradients(made, what) if value.requires_grad else made


def refusing_gradients(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A leaf that raises an error if a gradient arrives."""
    tensor.requires_grad_().register_hook(lambda _: _refuse(what))
    return tensor


def _refuse(what: str) -> None:
    raise RuntimeError(f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                       f"{what} was first read after its parameters had changed")

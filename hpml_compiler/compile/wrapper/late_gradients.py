"""Gradients that arrive at outputs whose graph was compiled without them: the call is repeated, with a backward that takes
them."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpml_compiler.runtime.consistency.initial_sync import generator_states
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput, lazy_output
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.outputs.kept_inputs import same_values, sample_of, watch_changes
from hpml_compiler.runtime.outputs.loss_memory import version_of
from hpml_compiler.runtime.program.second_derivatives import without_graph
from passes import compat
from passes.errors import HpmlError

Compute = Callable[["DetachedCall", Sequence["torch.Tensor | None"]], Sequence["torch.Tensor | None"]]


class DetachedCall:
    """One call of a graph, some of whose results were detached: its inputs and random states. changed: positions of inputs that
    the graph changes in place, but computes nothing from. compute: the gradients of `inputs`, those among the arguments with
    gradients, for gradients at these results. draws: whether the graph draws random numbers."""

    def __init__(self, args: Sequence[Any], changed: Sequence[int], draws: bool, what: str, compute: Compute) -> None:
        self.args, self.changed, self.what, self._compute = tuple(args), frozenset(changed), what, compute
        self.states = generator_states() if draws else []
        self._versions, self._lost = self._now(), frozenset[int]()
        self._specs: list[Any] = []
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_over = False

    def _now(self) -> list[int]:
        return [version_of(x) if isinstance(x, torch.Tensor) and not x.is_inference() else 0 for x in self.args]

    def note_forward(self) -> bool:
        """Returns False if the call cannot be repeated: the graph has changed other inputs than `changed`."""
        self._lost = self._different() - self.changed
        self._versions = self._now()
        watch_changes(self)
        return not self._lost

    def _different(self) -> frozenset[int]:
        """Positions of inputs that were changed since the call began, or since forward."""
        pairs = zip(self._now(), self._versions, strict=True)
        return frozenset(k for k, (one, other) in enumerate(pairs) if one != other)

    def copy(self) -> None:
        """Called before an optimizer's step, whose changes the versions tell."""

    def note_data(self, parameter: torch.Tensor) -> None:
        """Called before a use of a parameter's `.data`, through which it may be changed without a new version."""
        if any(x is parameter for x in self.args) and all(x is not parameter for x, _ in self._samples):
            self._samples.append((parameter, sample_of(parameter)))

    def attach(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The detached results as outputs for the script, through which gradients get to the inputs. Those that are sharded get
        another local part."""
        self._specs = [vars(x)["spec"] if isinstance(x, LazyOutput) else None for x in results]
        parts = [vars(x)["part"] if isinstance(x, LazyOutput) else x for x in results]
        with compat.saving_without_hooks():
            made = LateGradient.apply(self, parts, *inputs)
        return [lazy_output(part, vars(x)["spec"], vars(x)["shared"]) if isinstance(x, LazyOutput) else part
                for part, x in zip(made, results, strict=True)]

    def after(self, node: Any) -> None:
        """Free the inputs after a backward through the call's other results, unless it may be repeated."""
        reference = weakref.ref(self)

        def before(*_: Any) -> None:
            if not torch.compiler.is_compiling() and (call := reference()) is not None:
                call.free_after_backward()

        node.register_prehook(before)

    def free_after_backward(self) -> None:
        if not compat.keeps_graph():
            reference = weakref.ref(self)
            compat.after_backward(lambda: None if (call := reference()) is None else call.free())

    def free(self) -> None:
        self.args, self._samples, self._is_over = (), [], True

    def gradients(self, arriving: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Gradients of the inputs. arriving: at the results, of this rank's parts."""
        if self._is_over:
            raise RuntimeError(f"Trying to backward through {self.what} a second time: what its gradient is computed from was "
                               "freed by the first backward. Specify retain_graph=True there to do this")
        if (position := self._changed()) is not None:
            raise HpmlError("one of the variables needed for gradient computation has been modified by an inplace operation: "
                            f"{self.what} gets its first gradient after input {position} of its graph was changed",
                            f"an input of shape {tuple(self.args[position].shape)}",
                            "call backward before that, or give the model a copy (x.clone())")
        self.free_after_backward()
        placed = [x if x is None or spec is None else _of_part(x, spec) for x, spec in zip(arriving, self._specs, strict=True)]
        with torch.no_grad():
            found = self._compute(self, placed)
        return [without_graph(x) if torch.is_grad_enabled() and x is not None else x for x in found]

    def _changed(self) -> int | None:
        """Position of an input whose values are no longer those of the call."""
        written = [x for x, sample in self._samples if not same_values(sample, sample_of(x))]
        data = {k for k, x in enumerate(self.args) if any(x is y for y in written)}
        return min(self._different() - self.changed | self._lost | data, default=None)


def _of_part(gradient: torch.Tensor, spec: Any) -> torch.Tensor:
    with compat.plain_torch_functions():
        return compat.make_dtensor(PlacedTensor, gradient, spec)


class LateGradient(torch.autograd.Function):
    """Autograd function from a graph's inputs to results that were computed before; its backward runs only if a gradient
    arrives."""

    @staticmethod
    @compat.untraced
    def forward(ctx: Any, call: DetachedCall, results: Sequence[torch.Tensor], *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in results])

    @staticmethod
    @compat.untraced
    def backward(ctx: Any, *arriving: torch.Tensor | None) -> Any:
        return None, None, *ctx.call.gradients(arriving)

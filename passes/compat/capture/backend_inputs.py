"""Dynamo's call of a backend: example inputs of a class that most backends cannot trace."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from passes.compat.patching.patches import replace_for_good


class _PlainInputs(list):
    """Example inputs of a graph with plain fakes in place of instances of a class. given: Dynamo's own inputs.
    taken: True once the backend has requested those."""

    given: Sequence[Any]
    taken = False


def original_inputs(example_inputs: Sequence[Any]) -> Sequence[Any]:
    """Example inputs as Dynamo passed them, for a backend that supports the class."""
    if not isinstance(example_inputs, _PlainInputs):
        return example_inputs
    example_inputs.taken = True
    return example_inputs.given


def unwrap_backend_inputs(kind: type, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """For the rest of the process, backends get plain fakes of the same shape in place of instances of `kind` among their
    example inputs, unless they request the originals (`original_inputs`). `around` wraps the callable that such a backend
    returns."""
    def instead_of(compiler: Any) -> Any:
        @functools.wraps(compiler)
        def with_plain(self: Any, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            if not any(isinstance(value, kind) for value in example_inputs):
                return compiler(self, gm, example_inputs)
            fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
            plain = _PlainInputs(_plain_fake(fake) if isinstance(value, kind) else value
                                 for fake, value in zip(fakes, example_inputs, strict=True))
            plain.given = example_inputs
            compiled = compiler(self, gm, plain)
            return compiled if plain.taken else around(compiled)

        return with_plain

    replace_for_good({"OutputGraph.call_user_compiler": instead_of})


def _plain_fake(fake: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass(), fake._local_tensor.fake_mode:
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
        return made.requires_grad_(fake.requires_grad)

"""Initialize single modules by the rules of their model: `reset_parameters`, or transformers' `_init_weights`.

A tensor that a rule leaves as it is would have the values that were in memory. So tensors are filled before with values that no
rule gives, NaN for floating point numbers, and are checked afterwards.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from passes import compat

Rule = Callable[[], Any]


@dataclass(frozen=True)
class ModuleRule:
    """A module, its name in the model, and the rule that initializes it; None if it has none."""

    name: str
    module: nn.Module
    rule: Rule | None


def rules_of(model: nn.Module) -> list[ModuleRule]:
    """The modules with tensors on the meta device, in the order in which one device initializes them: modules with
    `reset_parameters` as they are made; those inside of a model of transformers after the modules in them, since rules there
    may change parameters of inner modules, and are all called."""
    return [each for each in _walk("", model, None, set()) if _has_meta(each.module, recurse=_library_of(each) is not None)]


def _walk(name: str, module: nn.Module, library: Any, seen: set[int]) -> Iterator[ModuleRule]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if is_of_library(module):
        library = module
    if library is None:
        yield ModuleRule(name, module, reset_of(module))
    for child_name, child in module.named_children():
        yield from _walk(f"{name}.{child_name}".lstrip("."), child, library, seen)
    if library is not None:
        yield ModuleRule(name, module, functools.partial(library._init_weights, module))


def _library_of(each: ModuleRule) -> Any:
    return each.rule.func if isinstance(each.rule, functools.partial) else None


def is_of_library(module: nn.Module) -> bool:
    """True for a `PreTrainedModel` of transformers, whose `_init_weights` initializes the modules inside of it."""
    return all(callable(getattr(module, name, None)) for name in ("_init_weights", "initialize_weights", "post_init"))


def reset_of(module: nn.Module) -> Rule | None:
    rule = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return rule if callable(rule) else None


def rule_of_buffers(model: nn.Module, module: nn.Module) -> Rule | None:
    """The rule of transformers for a module that has buffers alone, such as rotary embeddings; None if there is none."""
    if any(parameter is not None for parameter in module._parameters.values()):
        return None
    return next((each.rule for each in rules_of(model) if each.module is module and _library_of(each) is not None), None)


def _has_meta(module: nn.Module, recurse: bool) -> bool:
    return any(tensor.is_meta for tensor in [*module.parameters(recurse), *module.buffers(recurse)])


def unwritten_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of host memory with values that say that nothing was written."""
    made = torch.empty_like(tensor, device="cpu")
    if made.dtype is torch.bool:
        return made.fill_(False)
    return made.fill_(torch.nan if made.is_floating_point() or made.is_complex() else torch.iinfo(made.dtype).min)


def is_written(tensor: torch.Tensor, version: int) -> bool:
    """True if a tensor of `unwritten_like` has other values now. version: of its values then. (A rule may write to `.data`,
    which counts no versions.)"""
    with compat.plain_torch_functions(), torch.no_grad():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
        if local._version != version or not local.numel() or local.dtype is torch.bool:
            return local._version != version or not local.numel()
        if local.is_floating_point() or local.is_complex():
            return not local.isnan().any().item()
        return not (local == torch.iinfo(local.dtype).min).any().item()


def initialize_buffers(module: nn.Module, rule: Rule, names: Collection[str]) -> list[str]:
    """Make the buffers of these names by the module's rule, in host memory, without a change of the generators of random
    numbers. Returns those that the rule has not written."""
    for name, buffer in module._buffers.items():
        if name in names and buffer is not None:
            module._buffers[name] = unwritten_like(buffer)
    versions = {name: each._version for name in names if (each := module._buffers[name]) is not None}
    with torch.no_grad(), torch.random.fork_rng([]):
        rule()
    return [name for name, version in versions.items()
            if (each := module._buffers[name]) is not None and not is_written(each, version)]

"""Replace a module's parameters by placed tensors while Dynamo compiles the first graph that uses them."""
from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hpml_compiler.runtime.batch.batch_shard import BatchShard, write_back_views
from hpml_compiler.runtime.dtensor.export_guard import watch_torchscript
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput, is_detached_of
from hpml_compiler.runtime.dtensor.op_dispatch import shares_memory, store_value
from hpml_compiler.runtime.dtensor.parameter_aliases import aliases_of, check_links, held_gradients, inseparable
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, in_place_of, place, place_like
from hpml_compiler.runtime.dtensor.script_collectives import watch_collectives
from hpml_compiler.runtime.install.functorch_guard import watch_transforms
from hpml_compiler.runtime.install.numpy_views import numpy_views
from hpml_compiler.runtime.install.other_backends import watch_backends
from hpml_compiler.runtime.install.swap_parameters import holder_on_the_way, rebind, rebind_attributes, rebind_in
from hpml_compiler.runtime.install.to_local import ToLocal
from hpml_compiler.runtime.optimizer.optimizer_step import watch_optimizers
from hpml_compiler.runtime.outputs.output_parts import OutputParts
from hpml_compiler.runtime.placements.inner_shard import blocks_along
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.placements.single_rank_placement import at_owner, from_owner
from hpml_compiler.runtime.placements.unsharded_params import UnshardedInputs
from hpml_compiler.runtime.process.live_objects import live_objects
from passes import compat
from passes.errors import BadInput
from passes.graph.graph_signature import parameter_name
from passes.session_state import state_of

log, told = logging.getLogger(__name__), logging.getLogger("hpml")


class BoundParameters:
    """Converts the arguments of one compiled graph to this rank's local tensors.

    gathered: placed arguments that the graph takes whole. written: arguments that it changes in place. rows: arguments that
    are batch shards. outputs: arguments that other graphs returned. parts: those of them that it takes sharded. holding:
    sharded parameters that the graph takes unsharded. borrowed: parameters owned by one rank of an axis whose part the graph
    needs on all ranks. aliases: the script's tensors in the memory of a replaced parameter, each with that parameter's index.
    """

    def __init__(self, placed: Sequence[int], trainable: Sequence[int], names: Sequence[str],
                 olds: list[nn.Parameter], news: Sequence[nn.Parameter], gathered: Sequence[int] = (),
                 written: Collection[int] = (), rows: Sequence[int] = (), holding: UnshardedInputs | None = None,
                 outputs: Sequence[int] = (), borrowed: Collection[int] = (),
                 aliases: Sequence[tuple[weakref.ref[torch.Tensor], int]] = (),
                 parts: OutputParts | None = None) -> None:
        self._placed, self._trainable = tuple(placed), tuple(trainable)
        self._names, self._olds, self._news, self._aliases = list(names), olds, list(news), aliases
        self._gathered, self._written, self._rows = tuple(gathered), sorted(set(written) & set(gathered)), tuple(rows)
        self._outputs, self._mutated = frozenset(outputs), sorted(written)
        self._holding, self._borrowed, self._parts = holding or None, frozenset(borrowed), parts or OutputParts({})
        self._borrowed_views = frozenset(k for k, index in enumerate(self._trainable) if index in self._borrowed)
        if olds:
            state_of(_Unfinished).left.add(self)

    def locals(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of a call with plain local tensors for DTensors, connected to them by autograd.

        The first call also replaces the old parameters in the rest of the script. (Not earlier: Dynamo still needs them
        while it compiles.)
        """
        if self._olds:
            self.replace_elsewhere()
        check_links()
        for index in self._rows:
            write_back_views(args[index])
        result = list(args)
        for index in self._placed:
            result[index] = args[index]._local_tensor
        if self._trainable and torch.is_grad_enabled():
            views = ToLocal.apply(self._borrowed_views, *[args[index] for index in self._trainable])
            for index, view in zip(self._trainable, views, strict=True):
                result[index] = view
            lent = self._borrowed.difference(self._trainable)
        else:
            lent = self._borrowed
        for index in sorted(lent):
            result[index] = from_owner(args[index])
        for index in self._gathered:
            result[index] = to_full_tensor(args[index])
        self._parts.take(args, result)
        for one, other in self._pairs(len(args)):
            if isinstance(result[one], torch.Tensor) and shares_memory(result[one], result[other]) or is_detached_of(
                    args[one], args[other]):
                raise BadInput("a compiled function mutates one of its arguments, and another, the output of a compiled "
                               "model, shares memory with it: the function was traced without this alias",
                               f"arguments {one} and {other} of its graph", "pass a clone() of one of them")
        if self._holding is not None:
            self._holding.take([lent_part(x) if k in self._borrowed else x for k, x in enumerate(args)])
        return result

    def _pairs(self, count: int) -> Iterator[tuple[int, int]]:
        """Arguments, each with one that the graph changes in place, that may share memory: one is the output of a graph."""
        for changed in self._mutated if self._outputs else ():
            others = range(count) if changed in self._outputs else self._outputs
            yield from ((other, changed) for other in others if other != changed)

    def write_back(self, args: Sequence[Any], results: Sequence[Any]) -> None:
        """Store in-place changes in the placed arguments, after a call. results: its list from `locals(args)`."""
        for index in self._written:
            store_value(args[index], results[index].detach())

    @property
    def writes(self) -> bool:
        """True if `write_back` has anything to do."""
        return bool(self._written)

    def replace_elsewhere(self) -> None:
        state_of(_Unfinished).left.discard(self)
        for ref, at in self._aliases:
            alias = ref()
            if alias is not None:  # `p.detach()`, `p.data`: continues to share the parameter's memory
                self._names.append(self._names[at])
                self._olds.append(alias)  # type: ignore[arg-type]
                self._news.append(self._news[at].detach())  # type: ignore[arg-type]
        alias = None
        out_of_reach = rebind(self._names, self._olds, self._news)
        self._news.clear()
        if out_of_reach:
            log.info("old objects of these parameters are still referenced and raise an error when used: %s",
                     ", ".join(out_of_reach))


class _Unfinished:
    """left: graphs whose parameters are replaced in modules alone, since they have not been called."""

    def __init__(self) -> None:
        self.left = set[BoundParameters]()


def finish_replacements() -> None:
    """Replace in the rest of the script, too, the parameters of graphs whose first call an error has prevented."""
    for each in [*state_of(_Unfinished).left]:
        each.replace_elsewhere()


def placeable(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """Positions of the graph inputs that `shard_module` can place: plain module parameters that can be replaced at every
    source where Dynamo found them. Dynamo checks its guards on these sources at the end of the compilation; local variables
    of a running function (arguments of a compiled function, tuples in them) cannot be replaced before that."""
    ways = _ways_to(gm)
    found = {i: ways[source] for i, (value, source) in enumerate(zip(example_inputs, compat.input_sources(gm), strict=True))
             if type(value) is nn.Parameter and source is not None}
    _leave_out_inseparable(found, gm, example_inputs)
    reached = [i for i, names in found.items() if all(
        _is_of_module(each) or holder_on_the_way(example_inputs[i], compat.objects_to(each)) is not None for each in names)]
    elsewhere = [i for i in reached if not any(map(_is_of_module, found[i]))]
    sites = find_sites([example_inputs[i] for i in elsewhere]) if elsewhere else {}
    return [i for i in reached if i not in elsewhere or id(example_inputs[i]) in sites]


def _leave_out_inseparable(found: dict[int, list[Any]], gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Remove parameters that share memory with a tensor or array that could not follow their sharding."""
    parameters = [example_inputs[i] for i in found]
    others: dict[int, Any] = inseparable(
        parameters, {id(value) for value in example_inputs if isinstance(value, torch.Tensor)}) | numpy_views(parameters)
    names = {i: parameter_name(compat.input_sources(gm)[i]) for i in found if id(example_inputs[i]) in others}
    if not names:
        return
    first = min(names)
    other = others[id(example_inputs[first])]
    told.warning("%s%s replicated: it shares memory with another %s, of shape %s, which cannot follow its shards. "
                "To shard the parameter, delete that one or replace it by a clone()", names[first],
                " stays" if len(names) == 1 else f" and {len(names) - 1} more parameters stay",
                "parameter" if isinstance(other, nn.Parameter) else
                "tensor of the script" if isinstance(other, torch.Tensor) else "NumPy array", tuple(other.shape))
    for i in names:
        del found[i]


def _ways_to(gm: torch.fx.GraphModule) -> dict[Any, list[Any]]:
    """Source of a graph input -> all sources where Dynamo found the same tensor, the input's own first."""
    return {source: [source, *others] for source, others in compat.duplicated_inputs(gm).items()}


def _is_of_module(source: Any) -> bool:
    """True if a source is an entry of a module's `_parameters`."""
    return "._parameters[" in compat.source_name(source)


def shard_module(placements: Mapping[int, tuple[Placement, ...]], gm: torch.fx.GraphModule, example_inputs: Sequence[Any],
                 mesh: DeviceMesh, gathered: Collection[int] = (), written: Collection[int] = (),
                 holding: UnshardedInputs | None = None, borrowed: Collection[int] = ()) -> BoundParameters:
    """Replace parameters of a graph by placed ones, inside a Dynamo backend and before it returns.

    placements: position of a graph input -> its placement, one per axis of `mesh`; sizes must be divisible. `gm` and
    `example_inputs` as Dynamo passed them. Modules have the placed parameters when this returns; names, order, ties,
    `requires_grad`, gradients and hooks stay. Inputs placed before (parameters in a recompile, batch shards) need no entry.
    `gathered`, `written`, `holding` and `borrowed`: see `BoundParameters`. Raises BadInput for an input that cannot be placed.
    """
    olds = [example_inputs[i] for i in placements]
    sites = find_sites(olds) if olds else {}
    sources = compat.input_sources(gm)
    names = [parameter_name(source) for source in sources]
    for i, old in zip(placements, olds, strict=True):
        if type(old) is not nn.Parameter or id(old) not in sites:
            raise BadInput("only plain parameters that a module holds can be placed", f"graph input {names[i]}",
                           "remove it from the placements (see `placeable`)")
        _check_divides(names[i], old, mesh, placements[i])
    held, kept = held_gradients(olds), aliases_of(olds)
    aliases = [(weakref.ref(alias), at) for at, old in enumerate(olds) for alias in kept.pop(id(old), ())]
    news = [place_parameter(old, mesh, placements[i], id(old) in held) for i, old in zip(placements, olds, strict=True)]
    ways = _ways_to(gm) if olds else {}
    holders = [holder_on_the_way(old, compat.objects_to(each)) for i, old in zip(placements, olds, strict=True)
               for each in ways[sources[i]] if not _is_of_module(each)]
    for old, new in zip(olds, news, strict=True):
        for module, name in sites[id(old)]:
            module._parameters[name] = new
    rebind_in([holder for holder in holders if holder is not None], olds, news)
    # Also other attributes of these modules, which Dynamo may guard on: recurrent layers have lists of their parameters.
    rebind_attributes(dict.fromkeys(module for found in sites.values() for module, _ in found), olds, news)
    before = [i for i, value in enumerate(example_inputs) if isinstance(value, DTensor)]
    parts = {i: example_inputs[i]._spec for i in before if i not in gathered and isinstance(example_inputs[i], LazyOutput)}
    placed = sorted([*placements, *(i for i in before if i not in gathered and i not in parts)])
    trainable = [i for i in placed if example_inputs[i].requires_grad]
    at = dict(zip(placements, news, strict=True))
    guarded = [i for i in sorted([*placements, *before]) if isinstance(example_inputs[i], nn.Parameter)]
    for i in guarded:
        parameter: Any = at.get(i, example_inputs[i])
        parameter._spec = compat.interned_spec(parameter._spec)
    compat.guard_on_placement([sources[i] for i in guarded])
    watch_optimizers()
    watch_transforms()
    watch_torchscript()
    watch_collectives(PlacedTensor)
    watch_backends()
    compat.trace_as(PlacedTensor)
    return BoundParameters(placed, trainable, [names[i] for i in placements], olds, news, sorted(gathered), written,
                           [i for i in before if isinstance(example_inputs[i], BatchShard)], holding,
                           [i for i in before if isinstance(example_inputs[i], LazyOutput)], borrowed, aliases,
                           OutputParts(parts))


def lent_part(tensor: DTensor) -> DTensor:
    """A copy of the owner's part as a DTensor on every rank of the pipeline axis."""
    with compat.plain_torch_functions():
        return compat.make_dtensor(PlacedTensor, *at_owner(tensor._local_tensor, tensor._spec))


def _check_divides(name: str, parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    for dim, size in enumerate(parameter.shape):
        blocks = blocks_along(dim, mesh, placements)
        if size % blocks:
            raise BadInput(f"{blocks} parts do not divide dim {dim} of size {size}", f"parameter {name}",
                           "choose another placement for it")


def place_parameter(old: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement], held: bool = False) -> nn.Parameter:
    """Placed version of a parameter with the same values, attributes, hooks and accumulated gradient. held: another tensor of
    the script shares the gradient's memory."""
    new: Any = place(old, mesh, placements).requires_grad_(old.requires_grad)
    new.__dict__.update(old.__dict__)
    new._is_param = True  # isinstance(new, nn.Parameter) checks this; calling nn.Parameter would make another object
    if old.grad is not None:
        gradient = old.grad if old.grad.layout is torch.strided else old.grad.to_dense()
        new.grad = in_place_of(gradient, new) if held else place_like(gradient, new)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks) is not None:  # the same dict, so that the script's handles can remove their hooks
            setattr(new, hooks, getattr(old, hooks))
    return new


def find_sites(parameters: Sequence[nn.Parameter]) -> dict[int, list[tuple[nn.Module, str]]]:
    """id of a parameter -> (module, name) of all its uses; tied parameters have several."""
    wanted = {id(parameter) for parameter in parameters}
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in live_objects(nn.Module):
        for name, parameter in module.__dict__.get("_parameters", {}).items():
            if id(parameter) in wanted:
                sites.setdefault(id(parameter), []).append((module, name))
    return sites

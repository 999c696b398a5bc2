"""State of a training run: model, optimizers, schedulers, the position in the data, random states, and what the script adds.

Tensors are named `model/<name>`, `optimizer/<parameter>.<key>`, `compression/<parameter>...`, `replicas/<name>`,
`extra/<name>...`; all else is JSON.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpml_compiler.checkpoints.json_state import StateEncoder, decode
from hpml_compiler.checkpoints.random_states import random_states, restore_random_states, states_of_rank
from hpml_compiler.checkpoints.read_checkpoint import CheckpointReader
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.optimizer.compression_state import compression_tensors, restore_compression
from hpml_compiler.runtime.optimizer.replica_averages import ReplicaAverages
from hpml_compiler.runtime.optimizer.replica_state import RestoredReplicas, replica_tensors
from hpml_compiler.runtime.placements.shard_and_gather import without_partial
from hpml_compiler.runtime.process.world_group import this_rank, world_size
from passes import compat
from passes.errors import BadInput
from passes.session_state import state_of

CALLED = "hpml_compiler.Checkpointer"


@dataclass(frozen=True)
class ChangingState:
    """State besides parameters and the optimizers' tensors. tensors: by full name, not copied; state: JSON of the model,
    schedulers and extras; groups: options of the optimizers' groups; own: of this rank."""

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    groups: list[list[dict[str, Any]]]
    own: dict[str, Any]


class RunState:
    """The objects whose state is saved. loader and extra: objects with `state_dict` and `load_state_dict`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any], loader: Any,
                 extra: Mapping[str, Any]) -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.optimizers = list(optimizers)
        self.schedulers, self.loader, self.extra = list(schedulers), loader, dict(extra)
        stateful = {**{f"scheduler[{k}]": each for k, each in enumerate(self.schedulers)},
                    **{f"extra[{name!r}]": each for name, each in self.extra.items()},
                    **({} if loader is None else {"loader": loader})}
        for name, each in stateful.items():
            if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
                raise BadInput(f"a {type(each).__name__} has no state_dict and load_state_dict", f"{CALLED}({name})",
                               "wrap the loader: hpml_compiler.distribute(loader), or use torchdata's StatefulDataLoader"
                               if name == "loader" else "give objects that have both, such as a scheduler or GradScaler")

    def collect(self, compression: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
        """Tensors by name, the state without them, and this rank's own state (random states, position in the data).
        compression: also the state of PowerSGD and of replicas; all ranks must call it then."""
        self._check_memory()
        encoder = StateEncoder()
        state: dict[str, Any] = {"model": _model_state(self.model.state_dict(), encoder)}
        if compression:
            encoder.tensors.update((f"compression/{name}", each) for name, each in compression_tensors(self.model).items())
        state["optimizers"] = [self._optimizer_state(k, encoder) for k in range(len(self.optimizers))]
        if compression:
            own_tensors, replicas = replica_tensors(encoder.tensors, self.model, self.optimizers)
            encoder.tensors.update(own_tensors)
            state |= {"replicas": replicas} if replicas else {}
        state |= self._others(encoder)
        return encoder.tensors, state, self._own()

    def collect_changing(self) -> ChangingState:
        """The state that changes outside of an optimizer's step, too. Takes a fourth of the time of `collect`."""
        encoder = StateEncoder()
        values = self.model.state_dict(keep_vars=True)
        rest = {name: value for name, value in values.items() if not isinstance(value, torch.nn.Parameter)}
        state = {"model": _model_state(rest, encoder)}
        groups = [self._groups(k, encoder) for k in range(len(self.optimizers))]
        state |= self._others(encoder)
        return ChangingState(encoder.tensors, state, groups, self._own())

    def _others(self, encoder: StateEncoder) -> dict[str, Any]:
        return {"schedulers": [encoder.encode(each.state_dict(), f"extra/scheduler{k or ''}")
                               for k, each in enumerate(self.schedulers)],
                "extra": {name: encoder.encode(each.state_dict(), f"extra/{name}") for name, each in self.extra.items()}}

    def _own(self) -> dict[str, Any]:
        own: dict[str, Any] = {"random": random_states()}
        if self.loader is not None:
            own["loader"] = StateEncoder(inline=True).encode(self.loader.state_dict(), "loader")
        return own

    def _groups(self, index: int, encoder: StateEncoder) -> list[dict[str, Any]]:
        return [encoder.encode({key: value for key, value in group.items() if key not in ("params", "param_names")},
                               f"{self._folder_of(index)}/group{k}")
                for k, group in enumerate(self.optimizers[index].param_groups)]

    def _optimizer_state(self, index: int, encoder: StateEncoder) -> dict[str, Any]:
        """Groups with their options and the names of their parameters, and the state by name of the parameter."""
        optimizer, folder = self.optimizers[index], self._folder_of(index)
        names, content = self._parameter_names(optimizer), optimizer.state_dict()
        keys = [key for group in content["param_groups"] for key in group["params"]]
        name_of = dict(zip(keys, (name for group in names for name in group), strict=True))
        groups = self._groups(index, encoder)
        state = {name_of.get(key, key): encoder.encode(value, f"{folder}/{name_of.get(key, key)}")
                 for key, value in content["state"].items()}
        return {"groups": groups, "names": names, "state": state}

    def _folder_of(self, index: int) -> str:
        return "optimizer" if len(self.optimizers) == 1 else f"optimizer{index}"

    def parameter_names(self) -> list[str]:
        """Names of the model's parameters, those of tied ones too."""
        return list(_own_names(dict(self.model.named_parameters(remove_duplicate=False))))

    def _parameter_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        known: dict[int, str] = {}
        for name, parameter in _own_names(dict(self.model.named_parameters(remove_duplicate=False))).items():
            known.setdefault(id(parameter), name)
        return [[known.get(id(parameter), f"group{g}.parameter{p}") for p, parameter in enumerate(group["params"])]
                for g, group in enumerate(optimizer.param_groups)]

    def restore(self, reader: CheckpointReader) -> None:
        """Load a checkpoint into the objects. Raises BadInput, before anything is changed, if it is of other objects."""
        self._check_memory()
        state = reader.state
        whole = _own_names(self.model.state_dict())
        tensors = {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}
        self._check(reader, tensors)
        reader.load({f"model/{name}": value for name, value in tensors.items()})
        others = {name: decode(value, {}) for name, value in state["model"].items()}
        if others or not _are_of(self.model, tensors.values()):
            given = self.model.state_dict()
            cleaned = dict(zip(_own_names(given), given, strict=True))
            self.model.load_state_dict({cleaned[name]: value for name, value in {**tensors, **others}.items()})
        self._restore_compression(reader)
        for k, optimizer in enumerate(self.optimizers):
            self._restore_optimizer(optimizer, state["optimizers"][k], reader)
        self._restore_replicas(reader)
        values = _values(reader, [*state["schedulers"], state["extra"]])
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(decode(saved, values))
        for name, each in self.extra.items():
            each.load_state_dict(decode(state["extra"][name], values))
        ranks, saved_random = state["ranks"], [own["random"] for own in state["ranks"]]
        if self.loader is not None:
            self.loader.load_state_dict(decode(ranks[min(this_rank(), len(ranks) - 1)]["loader"], {}))
        restore_random_states(states_of_rank(saved_random, this_rank(), world_size()))

    def _restore_replicas(self, reader: CheckpointReader) -> None:
        averages, saved = state_of(ReplicaAverages), reader.state.get("replicas")
        averages.forget()
        if saved is None:
            return
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in reader.names("replicas").items()}
        reader.load({f"replicas/{name}": each for name, each in tensors.items()})
        averages.restored = RestoredReplicas(
            self.model, self.optimizers, [each["names"] for each in reader.state["optimizers"]],
            [self._folder_of(k) for k in range(len(self.optimizers))], tensors, saved["sizes"], saved["steps"])
        for mesh in averages.along:
            averages.restored.begin(mesh)

    def _restore_compression(self, reader: CheckpointReader) -> None:
        parameters = dict(self.model.named_parameters())
        targets = {name: _target(reader, f"compression/{name}", parameters.get(name.rpartition(".")[0]))
                   for name in reader.names("compression")}
        reader.load({f"compression/{name}": each for name, each in targets.items()})
        restore_compression(self.model, targets)

    def _check_memory(self) -> None:
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                raise BadInput(f"{name} is on the meta device: it has no memory", CALLED,
                               "call hpml_compiler.initialize(model) or hpml_compiler.load(model, folder) before")

    def _check(self, reader: CheckpointReader, tensors: Mapping[str, torch.Tensor]) -> None:
        where, state = f"checkpoint of step {reader.step}", reader.state
        saved = reader.names("model")
        mine = {name: (value.dtype, value.size()) for name, value in tensors.items()}
        for name in sorted(saved.keys() | mine.keys()):
            if name not in mine or name not in saved:
                what = f"has the tensor {name}, the model has not" if name in saved else f"has no tensor {name}, the model has"
                raise BadInput(f"the checkpoint is that of another model: it {what}", where,
                               "give the model that the checkpoint was saved from, or another folder")
            if mine[name] != saved[name]:
                raise BadInput(f"the checkpoint is that of another model: {name} is {_words(*saved[name])}, that of the model "
                               f"{_words(*mine[name])}", where, "give the model that the checkpoint was saved from; "
                               "hpml_compiler.load reads weights of another dtype")
        for what, had, have in (("optimizers", len(state["optimizers"]), len(self.optimizers)),
                                ("schedulers", len(state["schedulers"]), len(self.schedulers)),
                                ("loaders", int("loader" in state["ranks"][0]), int(self.loader is not None))):
            if had != have:
                raise BadInput(f"the checkpoint has {had} {what}, but {have} are given", where,
                               "give the checkpointer the objects that it was given when it saved")
        if missing := sorted(self.extra.keys() ^ state["extra"].keys()):
            what = "not in the checkpoint" if missing[0] in self.extra else "in the checkpoint, but not given"
            raise BadInput(f"extra {missing[0]!r} is {what}", where,
                           "give the checkpointer the `extra` that it was given when it saved")
        for k, optimizer in enumerate(self.optimizers):
            given, had_names = self._parameter_names(optimizer), state["optimizers"][k]["names"]
            if given != had_names:
                raise BadInput(f"the optimizer's groups have other parameters: {[len(group) for group in had_names]} in the "
                               f"checkpoint, {[len(group) for group in given]} here, or in another order", where,
                               "make the optimizer as in the run that saved")

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any], reader: CheckpointReader) -> None:
        parameters = {name: parameter for names, group in zip(saved["names"], optimizer.param_groups, strict=True)
                      for name, parameter in zip(names, group["params"], strict=True)}
        targets = {tensor: _target(reader, tensor, parameters.get(name)) for name, entry in saved["state"].items()
                   for tensor in _tensors_in(entry)}
        reader.load(targets)
        values = {**targets, **_values(reader, saved["groups"])}
        state = {name: decode(entry, values) for name, entry in saved["state"].items()}
        content = optimizer.state_dict()
        place = {name: index for names, group in zip(saved["names"], content["param_groups"], strict=True)
                 for name, index in zip(names, group["params"], strict=True)}
        groups = [{**decode(group, values), **{key: now[key] for key in ("params", "param_names") if key in now}}
                  for group, now in zip(saved["groups"], content["param_groups"], strict=True)]
        optimizer.load_state_dict({"state": {place.get(name, name): entry for name, entry in state.items()},
                                   "param_groups": groups})
        for name, entry in state.items():  # torch casts state to the parameter's dtype
            held = optimizer.state.get(parameters[name], {}) if name in parameters else {}
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, torch.Tensor) and getattr(held.get(key), "dtype", value.dtype) != value.dtype:
                    held[key] = value.to(held[key].device)


def _model_state(values: Mapping[str, Any], encoder: StateEncoder) -> dict[str, Any]:
    """Values of a model's state dict: tensors go to the encoder; returns the others as JSON."""
    others = dict[str, Any]()
    for name, value in _own_names(values).items():
        if isinstance(value, torch.Tensor):
            encoder.tensors[f"model/{name}"] = value
        else:
            others[name] = encoder.encode(value, f"extra/model.{name}")
    return others


def _own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names without the parts that `torch.compile` adds for compiled submodules."""
    return {name.replace("_orig_mod.", ""): value for name, value in values.items()}


def _words(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{'x'.join(map(str, shape)) or 'a scalar'} of {str(dtype).removeprefix('torch.')}"


def _are_of(model: nn.Module, tensors: Any) -> bool:
    """True if these tensors are the memory of the model's parameters and buffers, so that filling them is enough."""
    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    with compat.plain_torch_functions():
        held = {local(each).untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
        return all(local(tensor).untyped_storage().data_ptr() in held for tensor in tensors)


def _tensors_in(value: Any) -> list[str]:
    """Names of the tensors that a JSON value refers to."""
    if isinstance(value, dict):
        return [value["$tensor"]] if "$tensor" in value else [name for item in value.values() for name in _tensors_in(item)]
    return [name for item in value for name in _tensors_in(item)] if isinstance(value, list) else []


def _values(reader: CheckpointReader, saved: Any) -> dict[str, torch.Tensor]:
    targets = {name: _target(reader, name, None) for name in _tensors_in(saved)}
    reader.load(targets)
    return targets


def _target(reader: CheckpointReader, name: str, parameter: torch.Tensor | None) -> torch.Tensor:
    """An empty tensor for a saved one: placed like its parameter, if it has the parameter's shape, else in host memory."""
    dtype, shape = reader.described(name)
    if parameter is None or tuple(parameter.shape) != shape or not shape:
        return torch.empty(shape, dtype=dtype)
    if not isinstance(parameter, PlacedTensor):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    with compat.plain_torch_functions():
        like = torch.empty_strided(shape, parameter.stride(), dtype=dtype, device="meta")
        local = torch.empty_like(parameter._local_tensor, dtype=dtype, requires_grad=False)
        placements = without_partial(parameter._spec, like).placements
        return compat.make_dtensor(PlacedTensor, local, compat.dtensor_spec(parameter.device_mesh, placements, like))

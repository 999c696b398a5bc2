"""`hpml_compiler.load` and `hpml_compiler.save`: a model's weights as safetensors files in Hugging Face's layout."""
from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpml_compiler.runtime.dtensor.state_dicts import CALLED_BY_ONE
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.world_group import this_rank
from hpml_compiler.runtime.watchdog.barrier_check import require_all_ranks
from hpml_compiler.runtime.weights.safetensors_files import Chunk
from hpml_compiler.runtime.weights.weights_folder import MOST_BYTES, WeightsFolder
from hpml_compiler.runtime.weights.weights_source import WeightsSource
from hpml_compiler.weights.meta_models import MetaParameters, meta_buffers
from hpml_compiler.weights.module_initialization import initialize_buffers, rule_of_buffers
from passes.errors import BadInput


def load(model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True,
         mesh: Mapping[str, int] | None = None) -> nn.Module:
    """Load a model's weights from safetensors: each rank reads its shards only::

        with torch.device("meta"):
            model = Model()
        hpml_compiler.load(model, "weights")

    model: on the meta device, plain, or sharded. folder: with one file or Hugging Face's index, the `model` folder of a
    checkpoint, or the path of a file or index. Names are those of the model's state dict; of tied weights, one name is enough.
    Values are converted to the model's dtypes while they are read. A parameter on the meta device is stored as shards of dim 0
    over all ranks. strict: refuse files with other names or, if False, leave what they do not have as it is, and initialize
    nothing. mesh: for a model on the meta device, that of the compiled model, by
    default {"dp": ranks}. Returns the model. All ranks call this. Raises BadInput if names or shapes do not fit.
    """
    model = getattr(model, "_orig_mod", model)
    source = WeightsSource(folder)
    meta = MetaParameters(model, mesh)
    state: dict[str, Any] = {name: value for name, value in model.state_dict(keep_vars=True).items()
                             if isinstance(value, torch.Tensor)}
    same = _names_of_one_memory(state)
    _check(state, same, source, strict)
    _make_buffers(model, state, source)
    for parameter in list(meta.parameters.values()):
        names = [path for *_, path in meta.sites[id(parameter)]]
        if not any(name in source.shapes for name in names):
            raise BadInput(f"the parameter {names[0]} is on the meta device, and the files do not have it", source.path,
                           "give all files of the model")
        new = meta.empty(parameter)
        meta.put(parameter, new)
        state.update(dict.fromkeys(names, new))
    source.read({name: value.detach() for name, value in state.items() if name in source.shapes})
    state.clear()
    meta.finish()
    return model


def _make_buffers(model: nn.Module, state: dict[str, Any], source: WeightsSource) -> None:
    """Give memory to buffers of the meta device: to be read or, where the files do not have them, made by the rules of
    transformers, as those of rotary embeddings are."""
    for module, name, path in list(meta_buffers(model)):
        if path in source.shapes:
            module._buffers[name] = state[path] = torch.empty_like(state[path], device=device_type())
            continue
        buffer = module._buffers[name]
        if buffer is None or not buffer.is_meta:  # made with another one of the module
            continue
        rule = rule_of_buffers(model, module)
        others = [key for key, each in module._buffers.items() if each is not None and each.is_meta]
        if rule is None or name in initialize_buffers(module, rule, others):
            raise BadInput(f"the buffer {path} is on the meta device, and the files do not have it", source.path,
                           "make that module outside of torch.device('meta'), or assign the buffer before")
        for key in others:
            made = module._buffers[key]
            module._buffers[key] = made if made is None else made.to(device_type())


def _names_of_one_memory(state: dict[str, Any]) -> dict[str, list[str]]:
    """By name, all names of the same tensor."""
    names: dict[Any, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    return {name: names[id(value)] for name, value in state.items()}


def _check(state: dict[str, Any], same: dict[str, list[str]], source: WeightsSource, strict: bool) -> None:
    there = source.shapes
    for name, value in state.items():
        if name in there and there[name] != value.shape:
            raise BadInput(f"{name} is {'x'.join(map(str, there[name])) or 'a scalar'} in the files, and "
                           f"{'x'.join(map(str, value.shape)) or 'a scalar'} in the model", source.path,
                           "give the files of this model, or make the model with their sizes")
    missing = [name for name in state if not any(other in there for other in same[name])]
    more = [name for name in there if name not in state]
    if strict and (missing or more):
        what = " and ".join([*([f"the files do not have {missing[0]}"] if missing else []),
                             *([f"the model does not have {more[0]}"] if more else [])])
        raise BadInput(f"the files are those of another model: {what} ({len(missing)} and {len(more)} such names)",
                       source.path, "give the files of this model, or strict=False")


def save(model: nn.Module, folder: str | os.PathLike[str], *, file_bytes: int = MOST_BYTES) -> None:
    """Write a model's weights as safetensors, as `save_pretrained` does: model.safetensors, or files with an index.

    Tensors are gathered and written one by one: rank 0 holds one whole tensor besides its shards. Names are those of the state
    dict; tied weights are written once. file_bytes: size of a file. All ranks call this.
    """
    require_all_ranks("hpml_compiler.save", CALLED_BY_ONE, every=0)
    model = getattr(model, "_orig_mod", model)
    state: dict[str, Any] = {name: value for name, value in model.state_dict(keep_vars=True).items()
                             if isinstance(value, torch.Tensor)}
    chunks: dict[str, Chunk] = {}
    same = _names_of_one_memory(state)
    for name, value in state.items():
        if value.is_meta:
            raise BadInput(f"{name} is on the meta device: it has no values", "hpml_compiler.save",
                           "call hpml_compiler.load or hpml_compiler.initialize first")
        if same[name][0] == name:
            chunks[name] = value.dtype, tuple(value.shape)

    def value_of(name: str) -> torch.Tensor:
        with torch.no_grad():
            return to_full_tensor(state[name].detach()).cpu()

    WeightsFolder(Path(folder), chunks, file_bytes).write(value_of, writes=this_rank() == 0)

"""Integration with accelerate: `one_device()`, and checkpoints that all ranks gather and rank 0 writes."""
from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpml_compiler.integrations import transformers
from hpml_compiler.integrations.rank_zero_gather import barrier, gathered, gathered_states, holds_placed
from hpml_compiler.options import DefaultOptions, Options
from hpml_compiler.runtime.process.world_group import ensure_process_group
from passes import compat
from passes.errors import BadInput, MissingDependency
from passes.session_state import state_of

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def one_device(**options: Any) -> None:
    """Let accelerate see one device and one process, with rank 0 as the main process.

    accelerate then does not wrap models in DDP, gives every rank the same batches, does not reduce losses and metrics, and
    lets rank 0 write. Registers `dynamo_backend="hpml"`, also for `torch_compile_backend="hpml"` of transformers'
    TrainingArguments. To be called before an Accelerator or TrainingArguments are made. On one rank it only registers the
    backend.

    options: of the backend, for models that a library compiles by the backend's name alone.
    """
    try:
        from accelerate.state import PartialState
    except ImportError as error:
        raise MissingDependency("accelerate is not installed", "hpml_compiler.one_device()",
                                "pip install accelerate; without it, there is nothing that this has to tell") from error
    Options.parse(options)  # errors are raised here, not at the first step
    state_of(DefaultOptions).update(options)
    _know_the_backend()
    if ensure_process_group() == 1 or hasattr(PartialState.__init__, "__wrapped__"):
        return
    if PartialState._shared_state and PartialState().num_processes > 1:
        raise BadInput("accelerate has counted the ranks already", "hpml_compiler.one_device()",
                       "call it at the start of the script, before an Accelerator or TrainingArguments are made")
    PartialState._reset_state()
    compat.replace_for_good({"PartialState.__init__": compat.wrapping(_as_main_process)})
    watch_saves()


def _as_main_process(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        fresh = not self._shared_state
        if not fresh:
            original(self, cpu, **kwargs)
            return
        if "transformers.trainer" in sys.modules:
            transformers.watch_trainers()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            torch.cuda.set_device(local % torch.cuda.device_count())
        with _hidden(LAUNCHER):
            original(self, cpu, **kwargs)
        self.process_index, self.local_process_index = dist.get_rank(), local
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())

    return init


@functools.cache
def watch_saves() -> None:
    """Patch Accelerator: `save_state`, `save_model` and `get_state_dict` gather sharded tensors, and `load_state` shards."""

    def get_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: gathered(original(self, *args, **kwargs))

    def save_state(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(self: Any, *args: Any, **kwargs: Any) -> Any:
            with gathered_states(self._optimizers):
                result = original(self, *args, **kwargs)
            barrier()
            return result

        return save

    compat.replace_for_good({
        "Accelerator.get_state_dict": compat.wrapping(get_state_dict), "Accelerator.save_state": compat.wrapping(save_state),
        "checkpointing.load_model": compat.wrapping(_into_placed)})  # safetensors needs the storage of each parameter


def _into_placed(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(model: torch.nn.Module, filename: Any, *args: Any, **kwargs: Any) -> Any:
        held = model.state_dict()
        if not holds_placed(held):
            return original(model, filename, *args, **kwargs)
        from safetensors.torch import load_file

        saved = load_file(filename)
        missing, unexpected = model.load_state_dict(saved, strict=False)
        loaded = {_memory(held[name]) for name in saved if name in held}
        missing = [name for name in missing if _memory(held[name]) not in loaded]  # of tied weights, only one is in the file
        if missing or unexpected:
            raise BadInput(f"the checkpoint is of another model: it lacks {missing[:3]} and has {list(unexpected)[:3]} more",
                           str(filename), "load it into the model that it was saved from")
        return missing, unexpected

    return load_model


def _memory(tensor: torch.Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def _know_the_backend() -> None:
    """Add hpml to accelerate's enum of backends, which does not read torch's entry points."""
    from accelerate.utils import DynamoBackend

    if "HPML" in DynamoBackend.__members__:
        return
    member: Any = str.__new__(DynamoBackend, "HPML")
    member._name_, member._value_ = "HPML", "HPML"
    DynamoBackend._member_map_["HPML"] = member
    DynamoBackend._value2member_map_["HPML"] = member
    DynamoBackend._member_names_.append("HPML")


@contextlib.contextmanager
def _hidden(variables: tuple[str, ...]) -> Iterator[None]:
    held = {name: os.environ.pop(name) for name in variables if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)

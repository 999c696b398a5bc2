"""Integration with transformers' Trainer after `one_device()`: checkpoints that all ranks gather and rank 0 writes."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hpml_compiler.integrations.rank_zero_gather import barrier, gathered, gathered_states, holds_placed, is_first_rank


@functools.cache
def watch_trainers() -> None:
    """Patch Trainer to write whole checkpoints, and TrainingArguments to use one device per rank."""
    from transformers import Trainer, TrainingArguments

    _wrap(Trainer, "_save", _save)
    _wrap(Trainer, "_save_optimizer_and_scheduler", _save_optimizer)
    _wrap(Trainer, "_save_rng_state", _only_first)
    _wrap(Trainer, "_save_checkpoint", _then_together)
    if torch.cuda.is_available():
        _own_device(TrainingArguments)


def _wrap(kind: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(kind, name)
    setattr(kind, name, functools.wraps(original)(make(original)))


def _save(original: Callable[..., None]) -> Callable[..., None]:
    def save(self: Any, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:
            state_dict = self.accelerator.unwrap_model(self.model, keep_torch_compile=False).state_dict()
        if holds_placed(state_dict):
            state_dict = gathered(state_dict)
        original(self, output_dir, state_dict=state_dict)
        barrier()

    return save


def _save_optimizer(original: Callable[..., None]) -> Callable[..., None]:
    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        with gathered_states([self.optimizer]):
            original(self, *args, **kwargs)

    return save


def _only_first(original: Callable[..., None]) -> Callable[..., None]:
    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_first_rank():
            original(self, *args, **kwargs)

    return save


def _then_together(original: Callable[..., None]) -> Callable[..., None]:
    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        barrier()

    return save


def _own_device(kind: Any) -> None:
    """Let TrainingArguments use this rank's GPU. (As a single process it would use all GPUs by DataParallel.)"""
    here = torch.device("cuda", torch.cuda.current_device())
    given_device, given_count = kind.device, kind.n_gpu

    def device(self: Any) -> torch.device:
        found = given_device.fget(self)
        if found.type != "cuda":
            return found
        torch.cuda.set_device(here)
        return here

    kind.device = property(device)
    kind.n_gpu = property(lambda self: min(1, given_count.fget(self)))

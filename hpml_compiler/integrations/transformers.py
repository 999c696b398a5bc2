"""Integration with transformers' Trainer after `one_device()`: checkpoints that all ranks gather and rank 0 writes."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hpml_compiler.integrations.rank_zero_gather import barrier, gathered, gathered_states, holds_placed, is_first_rank
from passes import compat


@functools.cache
def watch_trainers() -> None:
    """Patch Trainer to write whole checkpoints, and TrainingArguments to use one device per rank."""
    for name, make in (("_save", _save), ("_save_optimizer_and_scheduler", _save_optimizer), ("_save_rng_state", _only_first),
                       ("_save_checkpoint", _then_together)):
        compat.replace_for_good({f"Trainer.{name}": compat.wrapping(make)})
    if torch.cuda.is_available():
        _use_own_device()


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


def _use_own_device() -> None:
    """Let TrainingArguments use this rank's GPU. (As a single process it would use all GPUs by DataParallel.)"""
    here = torch.device("cuda", torch.cuda.current_device())

    def device(original: Any) -> property:
        def own(self: Any) -> torch.device:
            found = original.fget(self)
            if found.type != "cuda":
                return found
            torch.cuda.set_device(here)
            return here

        return property(own)

    compat.replace_for_good({
        "TrainingArguments.device": device,
        "TrainingArguments.n_gpu": lambda original: property(lambda self: min(1, original.fget(self)))})

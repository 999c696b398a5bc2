"""Shared by the benchmarks: models, timed steps, medians, one JSON line."""
from __future__ import annotations

import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

# What an earlier run decided is no measurement of this one; a benchmark of that names a folder of its own.
if "HPML_CACHE_DIR" not in os.environ:
    os.environ["HPML_CACHE"] = "0"


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model and its batch, of classes of their own: Dynamo remembers by code object what it gave up, and a contender
    whose `forward` another one made it skip would run uncompiled."""
    spec = importlib.util.spec_from_file_location("models", Path(__file__).with_name("models.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make(name)


MODELS = ("mlp_wide", "mlp_batch", "gpt")


def stepper(call: Callable[..., Any], parameters: Any, batch: tuple) -> Callable[[], float]:
    """One training step as a function that returns the loss; the optimizer is AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = call(*batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def seconds(step: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    step()
    return clock() - start


def turn(timed: Callable[[], float], steps: int = 3) -> list[float]:
    """Times of one contender's turn in a round; a step before them brings its data into the caches."""
    timed()
    return [timed() for _ in range(steps)]


def median(values: list[float]) -> float:
    return statistics.median(values)


def report(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)

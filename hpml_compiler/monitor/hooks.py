"""Hooks of the monitor: wrappers of compiled graphs, and torch's public step hooks of all optimizers."""
from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpml_compiler.monitor.monitor import Monitor
from hpml_compiler.plans.schema import GraphPlan


class WatchedGraph:
    """A compiled graph whose calls are reported to the monitor."""

    def __init__(self, monitor: Monitor, plan: GraphPlan) -> None:
        self.monitor, self.number = monitor, monitor.add_graph(plan)
        monitor.disturbed()

    def forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        monitor, number = self.monitor, self.number

        def watched(*args: Any) -> Any:
            token = monitor.graph_begins(number, False, args)
            try:
                return call(*args)
            finally:
                monitor.graph_ends(token)

        return watched

    def backward(self, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Wrap a callable that takes its arguments as one list and empties it (a boxed call)."""
        monitor, number = self.monitor, self.number
        monitor.disturbed()  # backward was compiled just now, maybe in a later step than forward

        def watched(arguments: list[Any]) -> Any:
            token = monitor.graph_begins(number, True)
            try:
                return call(arguments)
            finally:
                monitor.graph_ends(token)

        watched._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of a boxed call
        return watched


@functools.cache
def watch_optimizers(current: Callable[[], Monitor | None]) -> None:
    """Report each optimizer step to the current monitor from now on, and finish it when the process exits."""

    def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and (monitor := current()) is not None:
            monitor.optimizer_begins(optimizer)

    def ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and (monitor := current()) is not None:
            monitor.optimizer_ends()

    def over() -> None:
        if (monitor := current()) is not None:
            monitor.finish()

    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(ends)
    atexit.register(over)

"""Hooks of the monitor: wrappers of compiled graphs, and torch's public step hooks of all optimizers."""
from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpml_compiler.monitor.monitor import PlanMonitor
from hpml_compiler.plans.schema import GraphPlan
from passes import compat
from passes.session_state import state


class WatchedGraph:
    """A compiled graph whose calls are reported to the monitor."""

    def __init__(self, monitor: PlanMonitor, plan: GraphPlan) -> None:
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

        return compat.mark_boxed(watched)


def watch_optimizers(current: Callable[[], PlanMonitor | None]) -> None:
    """Report each optimizer step to the current monitor until the session ends, and finish it when the process exits."""
    if not state.has(_MonitoredSteps):
        state.put(_MonitoredSteps(current))


class _MonitoredSteps:
    def __init__(self, current: Callable[[], PlanMonitor | None]) -> None:
        self.current = current
        self.hooks = register_optimizer_step_pre_hook(self._begins), register_optimizer_step_post_hook(self._ends)
        atexit.register(self._over)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        atexit.unregister(self._over)

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and (monitor := self.current()) is not None:
            monitor.optimizer_begins(optimizer)

    def _ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and (monitor := self.current()) is not None:
            monitor.optimizer_ends()

    def _over(self) -> None:
        if (monitor := self.current()) is not None:
            monitor.finish()

"""Compiled graphs whose rows move to faster ranks while a model trains (`balance="auto"`).

Each rank measures its own time in forward and backward, without waiting for others. After a window of steps, ranks exchange
their times, and all compute the same numbers of rows from those of the last two windows. Where these save, by each of the two,
more than a compilation takes, within as many steps as have run (at least 500), and enough not to be noise, the graph is
compiled again with them. Losses, gradients and metrics stay those of the whole batch.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile.balance.own_time import OwnTimes, WaitWatch
from hpml_compiler.compile.recovery.compiled_again import Call, Compile, CompiledAgain
from hpml_compiler.options import Options
from hpml_compiler.runtime.process.world_group import from_all_ranks, this_rank
from hpml_compiler.runtime.program.undefined_gradients import node_of
from hpml_compiler.session import session
from passes import compat
from passes.batch_balance.row_moves import RowMove, best_move
from passes.session_state import state_of

log = logging.getLogger("hpml")

WINDOW, WARM_UP, LEAST_AHEAD = 12, 3, 500
"""Calls between two decisions, those after a compilation that are not measured, and those that are expected to follow."""
AXIS = "dp"
_TIMED = "_hpml_timed"


def with_balance(gm: GraphModule, given: Sequence[Any], options: Options, compile_: Compile) -> Call:
    """Compile a graph; where the options ask for it, so that its rows move between ranks."""
    if options.balance != "auto" or not torch.is_grad_enabled() or not CompiledAgain.is_possible(gm):
        return compile_(gm, given, options)
    if not state_of(WaitWatch).works:
        log.warning("balance: this release of torch does not let hpml measure the time of each rank; rows stay where they are")
        return compile_(gm, given, options)
    return BalancedGraph(gm, given, options, compile_).run


class BalancedGraph:
    """call: the graph as it is compiled now, with `options`. rows: by coordinate along dp; () where they cannot move. calls: in
    training, so far, and `fresh` of them since it was compiled or the last window. windows: seconds by coordinate in each since
    it was compiled. compile_s: duration of the last compilation."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options, compile_: Compile) -> None:
        self.again, self.options = CompiledAgain(gm, compile_), options
        self.forward, self.backward = OwnTimes(), OwnTimes()
        self.calls = self.fresh = 0
        self.windows: list[list[float]] = []
        start = time.perf_counter()
        self.call = compile_(gm, given, options)
        self.compile_s = time.perf_counter() - start
        self.rows = _rows_of(self.again.name, options)

    @compat.untraced
    def run(self, *args: Any) -> Any:
        if not torch.is_grad_enabled() or not self.rows:
            return self.call(*args)
        if self.fresh == WARM_UP + WINDOW:
            self._decide()
        self.calls, self.fresh = self.calls + 1, self.fresh + 1
        if self.fresh <= WARM_UP:
            self.backward.forget()
            start = time.perf_counter()
            results = self.call(*args)
            self.compile_s = max(self.compile_s, time.perf_counter() - start)
        else:
            with self.forward.measured():
                results = self.call(*args)
        self._time_backward(results)
        return results

    def _decide(self) -> None:
        """Move rows if it pays. All ranks do the same, from the same numbers."""
        self.fresh = WARM_UP
        mine = self.forward.median_s() + self.backward.median_s(), self.compile_s
        with compat.outside_tracing():
            found = from_all_ranks(mine)
        seconds = _by_coordinate([own for own, _ in found], self.options)
        self.windows = [*self.windows[-1:], seconds] if all(seconds) else []
        if len(self.windows) < 2:
            return
        move = best_move(self.rows, self.windows, self.options.microbatches)
        if move.rows != self.rows and move.pays(max(self.calls, LEAST_AHEAD), max(cost for _, cost in found)):
            self._move(move)

    def _move(self, move: RowMove) -> None:
        if this_rank() == 0:
            log.warning("%s: rows along %s move from %s to %s: the slowest rank takes %.1f ms of its own, and %.1f ms then; "
                        "results stay those of the whole batch", self.again.name, AXIS, _words(self.rows), _words(move.rows),
                        1e3 * move.now_s, 1e3 * move.then_s)
        self.options = self.options.model_copy(update={"rows": {AXIS: move.rows}})
        self.call, self.rows, self.fresh, self.compile_s = self.again.compiled(self.options), move.rows, 0, 0.0
        self.windows = []

    def _time_backward(self, results: Sequence[Any]) -> None:
        """Measure calls of the autograd function that made the results; once per function."""
        with compat.plain_torch_functions():
            nodes = (node_of(x) for x in results if isinstance(x, torch.Tensor) and x.requires_grad)
            node = next((node for node in nodes if node is not None), None)
        function = None if node is None else compat.autograd_function(node)
        if function is None or hasattr(function, _TIMED):
            return
        setattr(function, _TIMED, True)
        first: Callable[..., Any] = function.backward
        times = self.backward

        @compat.untraced
        def backward(ctx: Any, *gradients: Any) -> Any:
            with times.measured():
                return first(ctx, *gradients)

        function.backward = staticmethod(backward)


def _rows_of(name: str, options: Options) -> tuple[int, ...]:
    """Rows of a graph by coordinate along the axis; () if its batch is not split along it."""
    plan = next((each for each in session.current().graphs if each.name == name), None)
    size = (options.mesh or {}).get(AXIS, 1)
    if plan is None or plan.rows is None or not plan.training:
        return ()
    unequal = plan.rows_by_rank.get(AXIS)
    return tuple(unequal) if unequal else () if plan.rows % size else (plan.rows // size,) * size


def _by_coordinate(seconds: Sequence[float], options: Options) -> list[float]:
    """The longest time of the ranks with each coordinate."""
    mesh = options.mesh or {}
    inner = 1
    for name in reversed(mesh):
        if name == AXIS:
            break
        inner *= mesh[name]
    size = mesh[AXIS]
    found = [0.0] * size
    for rank, own in enumerate(seconds):
        at = rank // inner % size
        found[at] = max(found[at], own)
    return found


def _words(rows: Sequence[int]) -> str:
    return "+".join(map(str, rows))

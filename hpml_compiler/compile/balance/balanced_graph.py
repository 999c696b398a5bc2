"""Compiled graphs whose work moves to faster ranks while a model trains (`balance="auto"`): rows, or blocks of a pipeline.

Each rank measures its own time in forward and backward, without waiting for others. After a window of steps, ranks exchange
their times, and all compute the same shares from those of the last two windows. Where these save, by each of the two,
more than a compilation takes, within as many steps as have run (at least 500), and enough not to be noise, the graph is
compiled again with them. Losses, gradients and metrics stay those of the whole batch.
"""
from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile.balance.movable_work import CutSpeeds, MovableWork, shares_of
from hpml_compiler.compile.balance.own_time import OwnTimes, WaitWatch
from hpml_compiler.compile.inputs.moved_parameters import StageMoves
from hpml_compiler.compile.recovery.compiled_again import Call, Compile, CompiledAgain
from hpml_compiler.options import Options
from hpml_compiler.runtime.process.world_group import from_all_ranks, this_rank
from hpml_compiler.runtime.program.undefined_gradients import node_of
from passes import compat
from passes.batch_balance.row_moves import WorkMove
from passes.session_state import state_of

log = logging.getLogger("hpml")

WINDOW, WARM_UP, LEAST_AHEAD = 12, 3, 500
"""Calls between two decisions, those after a compilation that are not measured, and those that are expected to follow."""
_TIMED = "_hpml_timed"


def with_balance(gm: GraphModule, given: Sequence[Any], options: Options, compile_: Compile) -> Call:
    """Compile a graph; where the options ask for it, so that its work moves between ranks."""
    if options.balance != "auto" or not torch.is_grad_enabled() or not CompiledAgain.is_possible(gm):
        return compile_(gm, given, options)
    if not state_of(WaitWatch).works:
        log.warning("balance: this release of torch does not let hpml measure the time of each rank; no work moves")
        return compile_(gm, given, options)
    if speeds := state_of(CutSpeeds).get(tuple((options.mesh or {}).items())):
        options = options.model_copy(update={"stage_speeds": speeds})
    with state_of(StageMoves).allowing(compat.frame_being_compiled()):
        return BalancedGraph(gm, given, options, compile_).run


class BalancedGraph:
    """call: the graph as it is compiled now. shares: the work of its ranks; None where it cannot move. calls: in training, so
    far, and `fresh` of them since it was compiled or the last window. windows: seconds by coordinate in each since it was
    compiled. compile_s: duration of the last compilation."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options, compile_: Compile) -> None:
        self.again = CompiledAgain(gm, compile_)
        self.forward, self.backward = OwnTimes(), OwnTimes()
        self.calls = self.fresh = 0
        self.windows: list[list[float]] = []
        start = time.perf_counter()
        self.call = compile_(gm, given, options)
        self.compile_s = time.perf_counter() - start
        self.shares = shares_of(self.again.name, options)

    @compat.untraced
    def run(self, *args: Any) -> Any:
        if not torch.is_grad_enabled() or self.shares is None:
            return self.call(*args)
        if self.fresh == WARM_UP + WINDOW and (move := self._decided(self.shares)) is not None:
            if (why := self.shares.obstacle(args)) == "":
                return self._moved(self.shares, move, args)
            log.warning("balance: %s: no work moves: %s", self.again.name, why)
            self.shares = None
            return self.call(*args)
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

    def _decided(self, shares: MovableWork) -> WorkMove | None:
        """The move that pays, if there is one. All ranks decide the same, from the same numbers."""
        self.fresh = WARM_UP
        mine = self.forward.median_s() + self.backward.median_s(), self.compile_s
        with compat.outside_tracing():
            found = from_all_ranks(mine)
        seconds = _by_coordinate([own for own, _ in found], shares.options.mesh or {}, shares.axis)
        self.windows = [*self.windows[-1:], seconds] if all(seconds) else []
        move = shares.best(self.windows) if len(self.windows) == 2 else None
        cost_s = max(cost for _, cost in found)
        return move if move is not None and move.pays(max(self.calls, LEAST_AHEAD), cost_s) else None

    def _moved(self, shares: MovableWork, move: WorkMove, args: Sequence[Any]) -> Any:
        """The results of a call: of the graph as compiled after the move, or of the old one where Dynamo is to compile it."""
        if this_rank() == 0:
            log.warning("%s: %s: the slowest rank takes %.1f ms of its own, and %.1f ms then; results stay those of the whole "
                        "batch", self.again.name, shares.words(move), 1e3 * move.now_s, 1e3 * move.then_s)
        options, start, self.windows = shares.after(move, self.again.frame, args), time.perf_counter(), []
        if options is None:
            return self.call(*args)
        self.call = self.again.compiled(options)
        results = self.call(*args)
        self.shares, self.compile_s = shares_of(self.again.name, options), time.perf_counter() - start
        self.calls, self.fresh = self.calls + 1, 1
        self._time_backward(results)
        return results

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


def _by_coordinate(seconds: Sequence[float], mesh: Mapping[str, int], axis: str) -> list[float]:
    """The longest time of the ranks with each coordinate along an axis."""
    inner = math.prod([*mesh.values()][list(mesh).index(axis) + 1:])
    found = [0.0] * mesh[axis]
    for rank, own in enumerate(seconds):
        at = rank // inner % mesh[axis]
        found[at] = max(found[at], own)
    return found

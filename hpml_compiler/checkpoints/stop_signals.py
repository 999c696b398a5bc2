"""SIGTERM and SIGUSR1: the scheduler takes the machine back, so the run saves at the next step and ends."""
from __future__ import annotations

import contextlib
import logging
import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("hpml")
STOPPED = 75
"""Exit code after a save that a signal asked for (EX_TEMPFAIL of sysexits.h: try again): start the script again."""
SIGNALS = ("SIGTERM", "SIGUSR1")


class StopSignals:
    """Notes signals, and lets all ranks learn of them at the same step. group: of all ranks, for this alone; None with one.

    Signals reach ranks at different moments. Each step therefore sends a number that the next step reads: all ranks see the
    signal one step after the first of them, and no step waits for another rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._noted = group, 0
        self._sent: tuple[Any, torch.Tensor] | None = None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals do not save checkpoints: the Checkpointer was not made in the main thread")
            return
        for name in SIGNALS:
            if hasattr(signal, name):
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number

    def agreed(self) -> str | None:
        """Name of a signal that all ranks know of, once a step."""
        if self._group is None:
            return signal.Signals(self._noted).name if self._noted else None
        seen = self._received()
        mine = torch.tensor([self._noted])
        self._sent = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True), mine
        return signal.Signals(seen).name if seen else None

    def _received(self) -> int:
        if self._sent is None:
            return 0
        (work, number), self._sent = self._sent, None
        work.wait()
        return int(number)

    def regroup(self, group: dist.ProcessGroup | None) -> None:
        """Go on with another group of all ranks."""
        self._group, self._sent = group, None

    def close(self) -> None:
        """Restore the handlers of before."""
        with contextlib.suppress(RuntimeError, ValueError):  # the group may be gone
            self._received()
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

"""Background writing of checkpoints: one thread, in order, with at most two in flight."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from hpml_compiler.runtime.process.world_group import from_all_ranks
from passes.errors import BadInput

IN_FLIGHT = 2


class SaveQueue:
    """All ranks put the same saves in the same order. A save returns its error, which is the same on all ranks, or None.

    The thread ends with the interpreter, after the saves that were put.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "hpml checkpoints")
        self._saves: deque[Future[Exception | None]] = deque()
        self._closed = False

    def put(self, save: Callable[[], Exception | None]) -> None:
        """Write in the background; waits while two are in flight. Raises the error of an earlier save."""
        if self._closed:
            raise BadInput("the checkpointer is closed", "hpml_compiler.Checkpointer", "make a new one, or close it later")
        done = min(from_all_ranks(sum(each.done() for each in self._saves)))  # those that all ranks know to be done
        for _ in range(max(done, len(self._saves) - IN_FLIGHT + 1)):
            self._take()
        self._saves.append(self._thread.submit(save))

    def wait(self) -> None:
        """Wait for all saves. Raises the error of the first that failed."""
        while self._saves:
            self._take()

    def close(self) -> None:
        self._closed = True
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def give_up(self) -> None:
        """Wait for the saves and ignore their errors: of those in flight, ranks that are gone have written a part."""
        while self._saves:
            self._saves.popleft().exception()

    def _take(self) -> None:
        error = self._saves.popleft().result()
        if error is not None:
            raise error

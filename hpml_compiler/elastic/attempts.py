"""`hpml_compiler.attempts`: training steps that are repeated where another rank was lost."""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from hpml_compiler.checkpoints.checkpointer import Checkpointer
from hpml_compiler.elastic.kept_state import KeptState
from hpml_compiler.elastic.membership import Membership
from hpml_compiler.elastic.restoration import Restoration
from hpml_compiler.elastic.state_copies import StateCopies
from hpml_compiler.elastic.world_change import form_world, leave_world
from hpml_compiler.run_recording.recorder import open_monitor
from hpml_compiler.runtime.install.plain_parameters import make_plain
from hpml_compiler.runtime.process.world_group import from_all_ranks, this_rank, world_size
from hpml_compiler.runtime.watchdog.attribution import is_distributed
from hpml_compiler.runtime.watchdog.heartbeat import LossNotice, RankLost
from hpml_compiler.runtime.watchdog.rank_status import RankStatus
from hpml_compiler.session.session import current
from passes.errors import BadInput, HpmlError
from passes.session_state import state, state_of

log = logging.getLogger("hpml")
WHERE = "hpml_compiler.attempts"


class StateLost(HpmlError):
    """No rank that is left has the state of a run, and there is no checkpoint."""


def attempts(checkpointer: Checkpointer, steps: int) -> Iterator[Attempt]:
    """Iterate over attempts at the steps of a run, from the newest checkpoint to step `steps`::

        for attempt in hpml_compiler.attempts(checkpointer, 1000):
            with attempt as step:
                x, y = attempt.batch()
                ...                                 # the step: forward, backward, optimizer.step()

    Calls `checkpointer.resume()` before the first and `checkpointer.step(step)` after each one. Under `hpml run --elastic`, if
    another rank is lost in a step, the error does not leave the `with`: this process forms a group with the others that are
    left, compiles the model for their number, and the next attempt repeats the step, from the state of the last completed step
    where a rank has all of it, or ranks have all parts (`redundancy`), else from the newest checkpoint. All other errors are
    raised.
    """
    membership = Membership.of_launcher()
    run = _Run(checkpointer, membership)
    try:
        yield from run.attempts(steps)
        run.say("ended")
    finally:
        run.close()


class Attempt:
    """One attempt at a step, entered with `with`, which gives the number of the step. done: the step is completed."""

    def __init__(self, run: _Run, step: int) -> None:
        self._run, self._step = run, step
        self.entered = self.done = False

    def __enter__(self) -> int:
        self.entered = True
        return self._step

    def batch(self) -> Any:
        """The next batch of the checkpointer's loader, pass after pass. A step that is repeated gets the same batch again."""
        return self._run.next_batch()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            self.done = True
            self._run.complete(self._step + 1)
            return False
        return isinstance(error, Exception) and self._run.is_of_lost_rank(error)


class _Run:
    def __init__(self, checkpointer: Checkpointer, membership: Membership | None) -> None:
        self.checkpointer, self.membership = checkpointer, membership
        self.kept: KeptState | None = None
        self.copies = list[StateCopies]()  # of this generation of ranks; before them, of an earlier one until these are there
        self._batches: Iterator[Any] | None = None
        self._warned = False

    def attempts(self, steps: int) -> Iterator[Attempt]:
        if self.membership is not None and self.membership.joins:
            self.membership.say("joins")
            self._wait_for_invitation(self.membership)
            state.put(self.membership.notice())
            done = self._go_on()
        else:
            done = self.checkpointer.resume()
            self._keep(done)
            if self.membership is not None:
                state.put(self.membership.notice())
            self.say("steps")
        while True:
            if self.membership is not None and self.membership.changed:
                done = self._go_on()
            if done >= steps:
                if self._all_are_done():
                    return
                continue
            attempt = Attempt(self, done)
            yield attempt
            if not attempt.entered:
                raise BadInput("a step ran outside of its attempt", WHERE, "write `with attempt as step:` around the step")
            done += attempt.done

    def complete(self, done: int) -> None:
        """Note that a step is completed, copy its state, and save a checkpoint where it is due."""
        self._keep(done)
        try:
            self._copy()
            self.say("waits")
            self.checkpointer.step(done - 1)
            self.say("steps")
        except Exception as error:
            if not self.is_of_lost_rank(error):
                raise

    def _keep(self, done: int) -> None:
        if self.membership is not None:
            if self.kept is not None:
                self.kept.close()
            self.kept = KeptState(self.checkpointer.run_state, done)

    def _copy(self) -> None:
        """Begin to send copies of sharded state to other ranks."""
        redundancy, membership = current().redundancy, self.membership
        if not redundancy or world_size() == 1:
            return
        if membership is None:
            if not self._warned and this_rank() == 0:
                log.warning("redundancy: %d has no effect without `hpml run --elastic`", redundancy)
            self._warned = True
            return
        if not self.copies or self.copies[-1].generation != membership.generation:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
            self.copies.append(StateCopies(membership.generation, redundancy, local))
        assert self.kept is not None
        self.copies[-1].copy(self.kept)
        if self.copies[-1].is_complete:
            del self.copies[:-1]

    def next_batch(self) -> Any:
        loader = self.checkpointer.run_state.loader
        if loader is None:
            raise BadInput("the checkpointer has no loader", "attempt.batch()", "give it one: Checkpointer(..., loader=loader)")
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(loader)
            if (batch := next(self._batches, self)) is not self:
                return batch
            self._batches = None
        raise BadInput("the loader has no batches", "attempt.batch()", "give one with at least one batch in each pass")

    def say(self, where: str) -> None:
        if self.membership is not None:
            self.membership.say(where)

    def close(self) -> None:
        state.take(LossNotice)
        if self.kept is not None:
            self.kept.close()
        if self.membership is not None:
            self.membership.close()

    def is_of_lost_rank(self, error: Exception) -> bool:
        """True if the launcher has lost a rank, so that this error is a consequence."""
        if self.membership is None:
            return False
        failed = is_distributed(error) or isinstance(error, RankLost)
        communicates = failed or isinstance(error, HpmlError)
        return self.membership.changed or communicates and self.membership.changes_soon(failed)

    def _all_are_done(self) -> bool:
        """Meet all ranks after the last step. False if one was lost before."""
        try:
            from_all_ranks(None)
            return True
        except Exception as error:
            if not self.is_of_lost_rank(error):
                raise
            return False

    def _wait_for_invitation(self, membership: Membership) -> None:
        while not membership.changed or membership.own not in membership.members(membership.newest()):
            membership.check_launcher()
            time.sleep(0.01)

    # -- with other ranks than before ------------------------------------------------------------------------------------

    def _go_on(self) -> int:
        """Go on with the ranks that are there now; returns the number of steps that are done."""
        membership = self.membership
        assert membership is not None
        begun = time.monotonic()
        state_of(RankStatus).failed = ""  # not all ranks failed in this call: that is known
        kept, is_there = self.kept, self.kept is not None and self.kept.is_there()
        for each in self.copies:
            each.settle()
        self._batches = None  # it is past the position that is restored
        self.checkpointer.give_up_saves()
        run = self.checkpointer.run_state
        make_plain(run.model, run.optimizers)
        leave_world()
        left = time.monotonic()
        while True:
            generation = membership.newest()
            if membership.wait_until_ready(generation):
                membership.generation = generation
                try:
                    return self._join(membership, is_there or self.kept is not kept, (begun, left))
                except Exception as error:
                    if not self.is_of_lost_rank(error):
                        raise
                    log.info("these ranks did not go on together: %s", error)
                    self.checkpointer.give_up_saves()
                    leave_world()

    def _join(self, membership: Membership, is_there: bool, times: tuple[float, float]) -> int:
        self.say("forms")
        generation = membership.generation
        members = membership.members(generation)
        form_world(generation, members.index(membership.own), len(members), membership.store_of(generation))
        formed = time.monotonic()
        self.checkpointer.regroup()
        done, source = self._restored(is_there)
        self._keep(done)
        if done and self.checkpointer.every and done % self.checkpointer.every == 0 and not self.checkpointer.has(done):
            self.checkpointer.save(done - 1)  # the one of that step was given up
        self.say("steps")
        now = time.monotonic()
        text = f"go on with {len(members)} ranks from {source}, after step {done}"
        if this_rank() == 0:
            log.warning("%s (%.2f s to leave the old process group, %.2f s to form the new one, %.2f s to restore)", text,
                        times[1] - times[0], formed - times[1], now - formed)
        if (monitor := open_monitor()) is not None:
            monitor.note("recovered", text)
        return done

    def _restored(self, is_there: bool) -> tuple[int, str]:
        """Restore the latest state that is in memory, or the newest checkpoint. Returns the number of steps that are done, and
        the source."""
        restoration = Restoration(self.kept if is_there else None, self.copies)
        held, reason = restoration.found(), restoration.reason()
        if held is not None:
            self.copies = [each for each in self.copies if each.is_complete]
            held.restore(self.checkpointer.run_state)
            return held.step, "memory"
        self.copies = []
        done = self.checkpointer.resume()
        if not done:
            raise StateLost("no ranks that are left have the whole state of the run, and there is no checkpoint", WHERE,
                            "save checkpoints more often; with redundancy: 1, one other rank has a copy of each rank's state")
        return done, f"the checkpoint ({reason})" if reason else "the checkpoint"

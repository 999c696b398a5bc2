"""`hpml_compiler.attempts`: training steps that are repeated where another rank was lost."""
from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from hpml_compiler.checkpoints.checkpointer import Checkpointer
from hpml_compiler.elastic.kept_state import HeldState, KeptState, sent_from
from hpml_compiler.elastic.membership import Membership
from hpml_compiler.elastic.world_change import form_world, leave_world
from hpml_compiler.run_recording.recorder import open_monitor
from hpml_compiler.runtime.install.plain_parameters import make_plain
from hpml_compiler.runtime.process.world_group import from_all_ranks, this_rank
from hpml_compiler.runtime.watchdog.attribution import is_distributed
from hpml_compiler.runtime.watchdog.heartbeat import LossNotice
from hpml_compiler.runtime.watchdog.rank_status import RankStatus
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
    where a rank has all of it, else from the newest checkpoint. All other errors are raised.
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
        self._batches: Iterator[Any] | None = None

    def attempts(self, steps: int) -> Iterator[Attempt]:
        if self.membership is not None and self.membership.joins:
            self.membership.say("joins")
            self._wait_for_invitation(self.membership)
            state.put(LossNotice(self.membership.changes_soon))
            done = self._go_on()
        else:
            done = self.checkpointer.resume()
            self._keep(done)
            if self.membership is not None:
                state.put(LossNotice(self.membership.changes_soon))
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
        """Note that a step is completed, and save a checkpoint where it is due."""
        self._keep(done)
        try:
            self.checkpointer.step(done - 1)
        except Exception as error:
            if not self.is_of_lost_rank(error):
                raise

    def _keep(self, done: int) -> None:
        if self.membership is not None:
            if self.kept is not None:
                self.kept.close()
            self.kept = KeptState(self.checkpointer.run_state, done)

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

    def is_of_lost_rank(self, error: Exception) -> bool:
        """True if the launcher has lost a rank, so that this error is a consequence."""
        if self.membership is None:
            return False
        communicates = is_distributed(error) or isinstance(error, HpmlError)
        return self.membership.changed or communicates and self.membership.changes_soon()

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
            time.sleep(0.01)

    # -- with other ranks than before ------------------------------------------------------------------------------------

    def _go_on(self) -> int:
        """Go on with the ranks that are there now; returns the number of steps that are done."""
        membership = self.membership
        assert membership is not None
        begun = time.monotonic()
        state_of(RankStatus).failed = ""  # not all ranks failed in this call: that is known
        kept, is_there = self.kept, self.kept is not None and self.kept.is_there()
        self._batches = None  # it is past the position that is restored
        self.checkpointer.give_up_saves()
        run = self.checkpointer.run_state
        make_plain(run.model, run.optimizers)
        leave_world()
        left = time.monotonic()
        while True:
            generation = membership.newest()
            if membership.wait_until_ready(generation):
                try:
                    return self._join(membership, generation, is_there or self.kept is not kept, (begun, left))
                except Exception as error:
                    if not membership.changed and not (is_distributed(error) and membership.changes_soon()):
                        raise
                    leave_world()

    def _join(self, membership: Membership, generation: int, is_there: bool, times: tuple[float, float]) -> int:
        members = membership.members(generation)
        form_world(generation, members.index(membership.own), len(members), membership.store_of(generation))
        formed = time.monotonic()
        self.checkpointer.regroup()
        done, source = self._restored(is_there)
        self._keep(done)
        if done and self.checkpointer.every and done % self.checkpointer.every == 0 and not self.checkpointer.has(done):
            self.checkpointer.save(done - 1)  # the one of that step was given up
        membership.generation = generation
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
        """Restore the state of the latest step that some rank has all of, or the newest checkpoint. Returns the number of steps
        that are done, and the source."""
        run, kept = self.checkpointer.run_state, self.kept
        mine = (kept.done, kept.own) if kept is not None and is_there else None
        all_of = from_all_ranks(mine)
        found = [each[0] for each in all_of if each is not None]
        if not found:
            done = self.checkpointer.resume()
            if not done:
                raise StateLost("no rank that is left has the whole state of the run, and there is no checkpoint", WHERE,
                                "save checkpoints more often, or store parameters and optimizer state whole: zero=0")
            return done, "the checkpoint"
        latest = max(found)
        has = [each is not None and each[0] == latest for each in all_of]
        source = has.index(True)
        # Ranks without that state take the random states of the first that has it.
        known = {rank: each[1] for rank, each in enumerate(all_of) if each is not None and each[0] == latest}
        own = [known.get(rank, known[source]) for rank in range(len(all_of))]
        held: HeldState | None = kept.held(own) if kept is not None and has[this_rank()] else None
        if not all(has):
            held = sent_from(source, held)
        assert held is not None
        held.restore(run)
        return latest, "memory"



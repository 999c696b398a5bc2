"""Compare graphs and options across ranks, broadcast plans from rank 0, and raise errors of one rank on all.

With one rank nothing is communicated. Uses a separate process group, so that messages of a rank that compiles alone do not
match collectives of the others.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from hpml_compiler.runtime.process.world_group import control_group, from_all_ranks, world_size
from hpml_compiler.runtime.watchdog.activity_scope import activity
from hpml_compiler.runtime.watchdog.store_wait import wait_for_all, wait_for_rank_0
from passes import compat
from passes.errors import BadInput, HpmlError

T = TypeVar("T")


class GraphMismatch(HpmlError):
    """Ranks traced different graphs."""


def first_difference(mine: str, reference: str) -> str:
    """The first line in which two graphs differ, as text."""
    ours, theirs = mine.splitlines(), reference.splitlines()
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        if a != b:
            return f"node {number}: here `{a}`, on rank 0 `{b}`"
    return f"here {len(ours)} nodes, on rank 0 {len(theirs)}"


def same_graph(text: Callable[[], str]) -> None:
    """Raises GraphMismatch on every rank if any rank's graph, as text, differs from rank 0's, showing the first difference."""
    if world_size() > 1:
        with compat.outside_tracing(), activity("comparing the graph with the other ranks'"):
            _compare(text)


def same_options(options: Mapping[str, Any]) -> None:
    """Raises BadInput on every rank if any rank was given other options than rank 0. Each decides by its own: ranks with other
    stages or microbatches would wait for each other forever, or train something else."""
    if world_size() == 1:
        return
    with compat.outside_tracing(), activity("comparing the options with the other ranks'"):
        told = from_all_ranks({name: str(value) for name, value in options.items()})
    for rank, theirs in enumerate(told):
        for name in sorted({*theirs, *told[0]}):
            mine, other = (each.get(name, "the default") for each in (theirs, told[0]))
            if mine != other:
                raise BadInput(f"rank {rank} was given {mine}, rank 0 {other}", f"options[{name!r}]",
                               "give every rank the same options; look for code that depends on the rank")


def _compare(text: Callable[[], str]) -> None:
    digests = from_all_ranks(hashlib.sha256(text().encode()).hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not different:
        return
    shared = [text() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0, group=control_group())
    found = from_all_ranks(first_difference(text(), str(shared[0])) if dist.get_rank() in different else None)
    raise GraphMismatch(
        f"rank {different[0]} traced a different graph than rank 0: {found[different[0]]}",
        where=f"ranks {different}",
        next_step="give every rank the same model, batch shape and options; look for code that depends on the rank",
    )


def from_rank_0(make: Callable[[], T]) -> T:
    """Run `make()` on rank 0 and return its result, or raise its error, on every rank, however long it takes."""
    if world_size() == 1:
        return make()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            with activity("planning"):
                box = [(True, make())]
        except Exception as error:  # broadcast to the waiting ranks, and raised again below
            box = [(False, error)]
    with compat.outside_tracing(), activity("waiting for the plan, which rank 0 makes"):
        wait_for_rank_0()
        dist.broadcast_object_list(box, src=0, group=control_group())
    good, answer = box[0]
    if good:
        return answer
    raise answer


def when_all_succeed(what: str, make: Callable[[], T], apart: Callable[[], bool] = lambda: True) -> T:
    """Run `make()` on every rank and return once all are done, however long each takes; an error on one is raised on all.

    apart: returns True once the rest of `make()` has no collectives. An earlier error is raised at once: the other ranks
    wait for this rank elsewhere, or have the same error.
    """
    if world_size() == 1:
        return make()
    made: list[T] = []
    error: Exception | None = None
    try:
        with activity(f"trying to {what}"):
            made.append(make())
    except Exception as raised:  # sent to the waiting ranks, and raised again below
        if not apart():
            raise
        error = raised
    with compat.outside_tracing(), activity(f"waiting for all ranks to {what}"):
        wait_for_all()
        found = from_all_ranks(f"{type(error).__name__}: {error}" if error else None)
    if error is not None:
        raise error
    bad = [rank for rank, said in enumerate(found) if said]
    if bad:
        raise HpmlError(f"rank {bad[0]} could not {what}: {found[bad[0]]}", f"rank {bad[0]}", "see the error on that rank")
    return made[0]


class CompiledTogether:
    """Compiles one graph on all ranks; an error on one is raised on all: in forward at once, in backward in its first call.

    agreed: True once the rest of `whole` has no collectives.
    """

    def __init__(self, name: str) -> None:
        self.name, self.agreed, self._done = name, False, False
        self._of_backward: Exception | None = None

    def compile_all(self, make: Callable[[], T]) -> T:
        """Run `make()`: everything that AOTAutograd compiles before the first call."""
        made = when_all_succeed(f"compile {self.name}", lambda: self._with_backward(make), lambda: self.agreed)
        self._done = True
        return made

    def _with_backward(self, make: Callable[[], T]) -> T:
        made = make()
        if self._of_backward is not None:
            raise self._of_backward
        return made

    def backward(self, make: Callable[[], T]) -> T:
        """Run `make()`: compile backward. If forward saves sizes, AOTAutograd compiles backward within `whole`, ignores an
        error, and would retry in the first call, on this rank alone."""
        if self._done:
            return when_all_succeed(f"compile backward of {self.name}", make)
        try:
            return make()
        except Exception as error:
            self._of_backward = error
            raise

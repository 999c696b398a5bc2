"""How a step goes through its batch in several microbatches, as part of a plan."""
from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpml_compiler.plans.fields import Names, Record


class MicrobatchPlan(Record):
    """count: of microbatches. share: of the work on rows, by estimated time, that is in their loop, 0 to 1.

    By the names of operations: before, after: done once, whole, before the loop and after it; all others are in it. sums: made
    in the loop in parts that are added up, so that they are as large for fewer rows. whole: of those outside of the loop, where
    rows go in, the dearest first: their rows depend on each other, or on what is known after the loop.

    loss_inside: the loss is computed in the graph, so that backward of a microbatch follows its forward; else forward of all
    comes first, and what all of them save is held."""

    count: Annotated[int, Field(ge=2)]
    share: Annotated[float, Field(ge=0.0, le=1.0)]
    before: Names = ()
    after: Names = ()
    sums: Names = ()
    whole: Names = ()
    loss_inside: bool = True

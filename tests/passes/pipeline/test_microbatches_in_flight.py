"""A table's actions -> what a rank holds at those of its computations at which it holds most."""
from __future__ import annotations

from dataclasses import astuple

import pytest

from passes.pipeline.microbatches_in_flight import moments_of
from passes.pipeline.pipeline_schedule import make_schedule


def messages(name, ranks, rank, virtual=1, at_once=True):
    """(stage, way) of the messages that are in memory, for each moment of the rank's stages."""
    return [[{(k, way) for k, load in moment.items() for way in ("sent", "sent_back") if getattr(load, way)}
             for moment in moments]
            for halves in moments_of(make_schedule(name, ranks, 4, virtual), rank, at_once).values() for moments in halves]


def test_the_last_message_each_way_stays_until_the_next():
    assert messages("1f1b", 2, 1) == [[{(1, "sent_back")}], [set(), {(1, "sent_back")}]], "once another ran"
    assert messages("1f1b", 3, 1)[1][-1] == {(1, "sent"), (1, "sent_back")}, "to two ranks"
    assert all(held == {(0, "sent")} for held in messages("gpipe", 2, 0)[1]), "forward's last is the last"
    assert not any(messages("gpipe", 2, 0, at_once=False)[1]), "it has arrived before backward begins"


@pytest.mark.parametrize(("name", "virtual"), [("interleaved", 2), ("zbv", 2)])
def test_two_ranks_hold_one_message_of_all_their_stages(name, virtual):
    found = [held for rank in (0, 1) for moments in messages(name, 2, rank, virtual) for held in moments]
    assert max(map(len, found)) == 1
    assert {way for held in found for _, way in held} == {"sent", "sent_back"}


@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2)])
@pytest.mark.parametrize("at_once", [True, False])
def test_each_moment_has_something_that_no_other_has_as_much_of(name, virtual, at_once):
    table = make_schedule(name, 4, 8, virtual)
    for rank in range(4):
        for stage, phases in moments_of(table, rank, at_once).items():
            for moments in phases:
                figures = [[each for load in moment.values() for each in astuple(load)] for moment in moments]
                assert not any(all(a <= b for a, b in zip(one, other)) for k, one in enumerate(figures)
                               for j, other in enumerate(figures) if j != k)
            if at_once and not table.splits_backward:
                most = max(moment[stage].saved for moments in phases for moment in moments)
                assert 1 + most == table.in_flight()[stage]


def test_1f1b_has_one_fullest_forward():
    (forward, backward), = moments_of(make_schedule("1f1b", 8, 64, 1), 0, True).values()
    assert [moment[0].saved for moment in forward] == [7] and len(backward) == 1

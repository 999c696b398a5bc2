"""A table's actions -> what a rank holds at each of its computations."""
from __future__ import annotations

import pytest

from passes.pipeline.microbatches_in_flight import moments_of
from passes.pipeline.pipeline_schedule import make_schedule


def messages(name, ranks, rank, virtual=1, at_once=True):
    """(stage, way) of the messages that are in memory, for each moment of the rank's stages."""
    return [[{(k, way) for k, load in moment.items() for way in ("sent", "sent_back") if getattr(load, way)}
             for moment in moments]
            for halves in moments_of(make_schedule(name, ranks, 4, virtual), rank, at_once).values() for moments in halves]


def test_the_last_message_each_way_stays_until_the_next():
    assert messages("1f1b", 2, 1) == [[set(), {(1, "sent_back")}], [set(), {(1, "sent_back")}]], "both ways from the first on"
    assert messages("1f1b", 3, 1)[1][-1] == {(1, "sent"), (1, "sent_back")}, "to two ranks"
    assert all(held == {(0, "sent")} for held in messages("gpipe", 2, 0)[1]), "forward's last is the last"
    assert not any(messages("gpipe", 2, 0, at_once=False)[1]), "it has arrived before backward begins"


@pytest.mark.parametrize(("name", "virtual"), [("interleaved", 2), ("zbv", 2)])
def test_two_ranks_hold_one_message_of_all_their_stages(name, virtual):
    found = [held for rank in (0, 1) for moments in messages(name, 2, rank, virtual) for held in moments]
    assert max(map(len, found)) == 1
    assert {way for held in found for _, way in held} == {"sent", "sent_back"}

"""Schedule tables: sends and receives, and invalid tables."""
from __future__ import annotations

from dataclasses import replace

import pytest

from passes.errors import HpmlError
from passes.pipeline.pipeline_schedule import ScheduleAction, check_schedule, make_schedule


def words(actions: tuple[ScheduleAction, ...]) -> str:
    letters = {"forward": "F", "backward": "B", "send_forward": ">F", "receive_forward": "<F", "send_backward": ">B",
               "receive_backward": "<B"}
    return " ".join(f"{letters[action.kind]}{action.microbatch}" for action in actions)


def test_two_ranks_by_hand():
    table = make_schedule("1f1b", 2, 2)
    assert words(table.actions[0]) == "F0 >F0 F1 >F1 <B0 B0 <B1 B1"
    assert words(table.actions[1]) == "<F0 F0 <F1 B0 >B0 F1 B1 >B1"


@pytest.mark.parametrize(("name", "p", "v", "m"), [
    ("gpipe", 4, 1, 3), ("1f1b", 4, 1, 8), ("1f1b", 8, 1, 3), ("interleaved", 2, 3, 4), ("interleaved", 4, 2, 8),
    ("zero_bubble", 4, 1, 8), ("zero_bubble", 4, 2, 4), ("zbv", 2, 2, 3), ("zbv", 4, 2, 8), ("gpipe", 1, 1, 2),
])
def test_every_message_has_two_ends_in_one_order(name, p, v, m):
    table = make_schedule(name, p, m, v)  # checked as it is made: nobody deadlocks though all wait
    for a in range(p):
        for b in range(p):
            between = [[action if action.kind.startswith("send") else action.other_end for action in table.actions[rank]
                        if not action.computes and {table.ranks[action.stage], table.ranks[action.other_end.stage]} == {a, b}]
                       for rank in (a, b)]
            assert between[0] == between[1] and all(x.other_end.other_end == x for x in between[0])
    assert sum(len(own) for own in table.actions) == m * p * v * (3 if table.splits_backward else 2) + 4 * m * sum(
        x != y for x, y in zip(table.ranks, table.ranks[1:]))


def swapped(own: tuple[ScheduleAction, ...], a: int, b: int) -> tuple[ScheduleAction, ...]:
    changed = list(own)
    changed[a], changed[b] = changed[b], changed[a]
    return tuple(changed)


def test_tables_that_do_not_work_are_refused():
    table = make_schedule("1f1b", 2, 2)
    first, second = table.actions
    with pytest.raises(HpmlError, match="deadlocks"):  # both send first, and wait until the other one receives
        check_schedule(replace(table, actions=(swapped(first, 3, 4), second)))
    with pytest.raises(HpmlError, match="deadlocks"):  # before it is received
        check_schedule(replace(table, actions=(first, swapped(second, 0, 1))))
    with pytest.raises(HpmlError, match="stage 1 runs microbatch 1 by"):
        check_schedule(replace(table, actions=(first, second[:-2])))
    with pytest.raises(HpmlError, match="runs microbatch 0 by"):
        check_schedule(replace(table, actions=((first[0], *first), second)))
    with pytest.raises(HpmlError, match="deadlocks"):  # a send without its receive
        check_schedule(replace(table, actions=(first, tuple(a for a in second if a.kind != "receive_forward"))))

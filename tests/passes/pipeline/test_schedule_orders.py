"""Each rank's computations in a pipeline, in order."""
from __future__ import annotations

import pytest

from passes.compat.execution.torch_pipelining import schedule_order
from passes.errors import BadInput
from passes.pipeline.schedule_orders import rank_orders, stages_of


@pytest.mark.parametrize(("name", "virtual", "parts"), [
    ("gpipe", 1, ("backward",)), ("1f1b", 1, ("backward",)), ("interleaved", 3, ("backward",)),
    ("zero_bubble", 1, ("backward_input", "backward_weight")), ("zero_bubble", 2, ("backward_input", "backward_weight")),
    ("zbv", 2, ("backward_input", "backward_weight")),
])
def test_every_rank_runs_each_microbatch_of_its_stages_once_each_way(name, virtual, parts):
    p, m = 4, 8
    for rank, actions in enumerate(rank_orders(name, p, virtual, m)):
        own = stages_of(name, rank, p, virtual)
        assert sorted(actions) == sorted((kind, s, i) for kind in ("forward", *parts) for s in own for i in range(m))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (3, 3, 9)])
def test_interleaved_is_that_of_torch(p, v, m):
    ours = [[("F" if kind == "forward" else "B", s, i) for kind, s, i in own] for own in rank_orders("interleaved", p, v, m)]
    assert ours == schedule_order("ScheduleInterleaved1F1B", p, v, m)


def test_what_torch_refuses_or_does_not_have_is_refused_by_name():
    with pytest.raises(BadInput, match="multiple of the number of rounds"):
        rank_orders("zero_bubble", 2, 2, 5)
    with pytest.raises(BadInput, match="has no ScheduleOfTomorrow"):
        schedule_order("ScheduleOfTomorrow", 2, 1, 2)

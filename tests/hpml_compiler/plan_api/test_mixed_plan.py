"""Handmade plans for mixed devices: validation, sums, JSON and tables."""
from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from hpml_compiler.options import Options
from hpml_compiler.plan_api.mixed_content import Alternative, CrossReduction, GroupShare, ShareAttempt
from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.plan_api.model_plan import Plan
from passes.errors import BadInput
from tests.helpers.plans import gpt_plan

FAST, SLOW = gpt_plan(3), gpt_plan(2)  # 166 and 118 µs


def share(rows: int, plan: Plan | None, cluster: str = "1x8:h100-80g") -> GroupShare:
    return GroupShare(cluster=cluster, devices=8, rows=rows, fraction=rows / 16, plan=plan,
                      step_time_us=plan.predicted.step_time_us if plan else 0.0, reason="" if plan else "too slow")


def mixed(*shares: GroupShare, **changes) -> MixedPlan:
    active = sum(each.rows > 0 for each in shares)
    size, time_us = (1000, 34.0) if active > 1 else (0, 0.0)
    cross = CrossReduction(groups=active, bytes=size, link="wire", predicted_us=time_us)
    fields = {
        "torch_version": "2.13.0+cpu", "world_size": 8 * len(shares), "cluster": "1x8:h100-80g + 1x8:v100-32g", "options": {},
        "batch": 16, "groups": shares, "cross": cross, "estimated_bound_us": 199.0, "energy_j": 0.4,
        "equal_split": Alternative(rows=(8, 8), step_time_us=400.0),
        "single_group": Alternative(rows=(16, 0), step_time_us=None, reason="no memory"),
        "attempts": [ShareAttempt(group=0, rows=16, step_time_us=None, peak_bytes=None, reason="no memory")],
        "seconds": {"trace": 1.0},
    }
    return MixedPlan.model_validate({**fields, **changes})


BOTH = mixed(share(12, FAST), share(4, SLOW, "1x8:v100-32g"))
ONE = mixed(share(16, FAST), share(0, None, "1x8:v100-32g"))


def test_the_slowest_group_and_adding_up_make_the_step():
    assert BOTH.predicted.step_time_us == pytest.approx(166.0 + 34.0)
    assert BOTH.predicted.communication_us == pytest.approx(FAST.predicted.communication_us + 34.0)
    assert ONE.predicted.step_time_us == pytest.approx(166.0)
    assert BOTH.power_w == pytest.approx(0.4 / 200e-6 / 16)


def test_file_gives_back_the_plan(tmp_path):
    BOTH.save(tmp_path / "plan.json")
    assert MixedPlan.load(tmp_path / "plan.json") == BOTH
    with pytest.raises(BadInput, match="groups of different devices") as caught:
        Plan.load(tmp_path / "plan.json")
    assert "MixedPlan.load" in caught.value.next_step
    FAST.save(tmp_path / "like.json")
    with pytest.raises(BadInput, match="not a mixed plan"):
        MixedPlan.load(tmp_path / "like.json")


@pytest.mark.parametrize(("changes", "message"), [
    ({"format_version": 1}, "format_version"),
    ({"batch": 17}, "do not add up to the batch of 17"),
    ({"world_size": 8}, "do not add up to world_size 8"),
    ({"surprise": 1}, "surprise"),
])
def test_load_refuses(tmp_path, changes, message):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(BOTH.to_json()) | changes))
    with pytest.raises(BadInput, match=message) as caught:
        MixedPlan.load(path)
    assert str(path) in caught.value.where


def test_rows_need_a_plan_and_a_plan_rows():
    with pytest.raises(ValidationError, match="16 rows but no plan"):
        share(16, None)
    with pytest.raises(ValidationError, match="0 rows but a plan"):
        share(0, FAST)
    with pytest.raises(ValidationError, match="has 4 devices, but its plan has 8"):
        GroupShare(cluster="1x4:cpu", devices=4, rows=16, fraction=1.0, plan=FAST, step_time_us=1.0)


def test_summary_is_json_with_the_keys_of_a_plan_for_like_devices():
    summary = json.loads(json.dumps(BOTH.summary_json(), allow_nan=False))
    assert set(summary) >= set(FAST.summary_json())
    assert (summary["step_time_s"], summary["world_size"], summary["mesh"]) == (pytest.approx(200e-6), 16, None)
    assert [(g["cluster"], g["rows"], g["fraction"]) for g in summary["groups"]] == [
        ("1x8:h100-80g", 12, 0.75), ("1x8:v100-32g", 4, 0.25)]
    assert summary["groups"][1]["plan"] == json.loads(json.dumps(SLOW.summary_json()))
    assert summary["cross_group"] == {"groups": 2, "bytes": 1000, "link": "wire", "time_s": pytest.approx(34e-6)}
    assert summary["equal_split"] == {"rows": [8, 8], "step_time_s": pytest.approx(400e-6), "reason": ""}
    assert summary["single_group"]["step_time_s"] is None
    assert ONE.summary_json()["groups"][1] == {
        "cluster": "1x8:v100-32g", "devices": 8, "rows": 0, "fraction": 0.0, "reason": "too slow", "step_time_s": 0.0,
        "plan": None}


def test_table_shows_shares_alternatives_and_the_plan_of_each_group():
    assert max(map(len, BOTH.table(80).splitlines())) <= 80
    text = BOTH.table(100)
    first = next(line for line in text.splitlines() if line.lstrip().startswith("1x8:h100-80g"))
    second = next(line for line in text.splitlines() if line.lstrip().startswith("1x8:v100-32g"))
    assert first.split()[1:4] == ["12", "75.0%", "1.5"] and "166 us" in first and "0.00 us" in first
    assert second.split()[1:4] == ["4", "25.0%", "0.5"] and "48.0 us" in second  # how long it waits
    assert "8 + 8 rows: 400 us, 2.00 times as long" in text
    assert "16 + 0 rows: infeasible, no memory" in text
    assert text.count("collectives") == 2
    alone = ONE.table()
    assert "unused          1x8:v100-32g: too slow" in alone and "nothing: one group takes all rows" in alone


def test_each_group_is_drawn_into_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(Plan, "render", lambda self, path, **options: path)
    assert [path.name for path in BOTH.render(tmp_path / "plan.svg")] == ["plan-0.svg", "plan-1.svg"]
    assert [path.name for path in ONE.render(tmp_path / "plan.svg")] == ["plan-0.svg"]


def test_ranks_run_it_on_one_mesh_with_unequal_rows(tmp_path):
    plan = mixed(share(12, FAST), share(4, SLOW), options={"mesh": {"dp": 2, "tp": 4}})
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        options = Options.parse({"plan": given, "zero": 3}).with_plan(16)
        assert (options.mesh, options.rows, options.plan) == ({"dp": 4, "tp": 4}, {"dp": (6, 6, 2, 2)}, None)
        assert options.zero == 3
        with pytest.raises(BadInput, match="mixed plan"):
            Options.parse({"plan": given}).load_plan()


@pytest.mark.parametrize("plan, options, world, message", [
    (BOTH, {}, 8, "for 16 ranks, but there are 8"),
    (BOTH, {}, 16, "has 4 rows for 8 ranks"),
    (ONE, {}, 16, "has 0 rows for 8 ranks"),
    (BOTH, {"mesh": {"pp": 2, "dp": 8}}, 16, "the axis 'dp'"),
    (mixed(share(8, FAST), share(8, SLOW), options={"mesh": {"pp": 8}}), {}, 16, "pipeline stages or microbatches"),
])
def test_what_ranks_cannot_run(plan, options, world, message):
    with pytest.raises(BadInput, match=message) as caught:
        Options.parse({"plan": mixed(share(8, FAST), share(8, SLOW)) if options else plan, **options}).with_plan(world)
    assert caught.value.next_step

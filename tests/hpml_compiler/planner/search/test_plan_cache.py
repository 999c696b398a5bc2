"""A graph planned in an earlier launch -> the same plan without a search; a search if the entry is invalid."""
from __future__ import annotations

import logging
import sqlite3

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.offline_planner import plan_traces
from hpml_compiler.planner.search.plan_cache import LIKE_PRICES, CachedPlan, _alike
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.plans.cache import graph_database
from passes.hardware.cluster import Cluster
from passes.solver.work_limit import WorkLimit

SEARCHED, FOUND = "decide_placements: wrote", "the plan is read from the plan cache"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HPML_CACHE", "1")
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Two(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def plan(rows: int = 8, layers: int = 1, **options) -> Plan:
    return hpml_compiler.plan(Two(layers), torch.zeros(rows, 32),
                              **{"cluster": "1x2:h100-80g", "compiler": "eager", **options})


def decided(made: Plan) -> dict:
    """All of it but how long that took."""
    found = made.model_dump()
    for graph in found["graphs"]:
        del graph["seconds"], graph["solver"]["seconds"]
    return found


@pytest.fixture
def said(caplog):
    """What the log has said since it was last asked."""
    caplog.set_level(logging.INFO)

    def ask() -> str:
        text = caplog.text
        caplog.clear()
        return text

    return ask


def entries(folder) -> dict[str, str]:
    with sqlite3.connect(folder / "plans.sqlite") as connection:
        return dict(connection.execute("SELECT key, entry FROM plan").fetchall())


@pytest.mark.parametrize("options", [{}, {"memory_budget": "120KiB"}, {"layers": 6}], ids=["plain", "budget", "folded"])
def test_the_second_launch_has_the_plan_of_the_first_without_a_search(options, said):
    first = plan(**options)
    assert SEARCHED in said()
    second = plan(**options)
    text = said()
    assert FOUND in text and SEARCHED not in text
    assert decided(second) == decided(first) and second.graphs[0].solver.gap is not None


@pytest.mark.parametrize("options", [{}, {"memory_budget": "120KiB"}], ids=["plain", "budget"])
def test_a_plan_that_is_found_takes_as_much_of_the_time_limit_as_a_search(options, said):
    def left_s() -> float:
        limit, parsed = WorkLimit(30.0), Options.parse({"compiler": "eager", **options})
        plan_traces(TracedModel(Two(1), torch.zeros(8, 32), parsed), Cluster.parse("1x2:h100-80g"), limit)
        return limit.left_s

    first = left_s()
    assert SEARCHED in said() and first < 30.0
    assert left_s() == pytest.approx(first, abs=1e-9) and FOUND in said()


def test_what_one_device_keeps_is_not_decided_twice(folder, said):
    tight = {"cluster": "1x1:h100-80g", "layers": 4, "rows": 512, "memory_budget": "1700KiB"}
    first = plan(**tight)
    assert "solve_checkpointing: wrote" in said() and first.graphs[0].kept.again
    second = plan(**tight)
    assert "solve_checkpointing: wrote" not in said() and decided(second) == decided(first)
    plan(**{**tight, "memory_budget": "1800KiB"})
    assert "solve_checkpointing: wrote" in said()
    with sqlite3.connect(folder / "plans.sqlite") as connection:
        connection.execute("""UPDATE plan SET entry = replace(entry, '"names":[', '"names":["nobody",')""")
    assert decided(plan(**tight)) == decided(first) and "is corrupt" in said()


def test_another_question_is_another_search(said):
    plan()
    said()
    for change in ({"rows": 4}, {"cluster": "1x4:h100-80g"}, {"mesh": {"tp": 2}}, {"memory_budget": "120KiB"}):
        plan(**change)
        assert FOUND not in said(), change


def test_without_the_cache_nothing_is_kept_nor_looked_up(monkeypatch, folder, said):
    monkeypatch.setenv("HPML_CACHE", "0")
    plan()
    plan()
    assert FOUND not in said() and not folder.exists()


@pytest.mark.parametrize("harm", ["{", '{"mesh": {"x": 2}}'])
def test_a_damaged_entry_costs_a_search_and_is_replaced(harm, folder, said):
    first = plan()
    with sqlite3.connect(folder / "plans.sqlite") as connection:
        connection.execute("UPDATE plan SET entry = ?", (harm,))
    assert decided(plan()) == decided(first) and "is corrupt" in said()
    plan()
    assert FOUND in said()


def test_what_costs_something_else_today_is_searched_anew(folder, said):
    """As if a formula had changed, or what was decided were of another graph: entities that are not there are nobody's."""
    first = plan()
    ((_, text),) = entries(folder).items()
    entry = CachedPlan.model_validate_json(text)
    cheaper = entry.solver.model_copy(update={"cost": 0.9 * entry.solver.cost, "bound": 0.9 * entry.solver.bound})
    nobody = {"nobody": next(iter(entry.decisions.values()))}
    for change in ({"solver": cheaper}, {"decisions": nobody, "solver": cheaper}, {"mesh": {"x": 3}}):
        with sqlite3.connect(folder / "plans.sqlite") as connection:
            connection.execute("UPDATE plan SET entry = ?", (entry.model_copy(update=change).model_dump_json(),))
        said()
        assert decided(plan()) == decided(first)
        assert "does not fit any more" in said()


def test_a_file_that_is_none_costs_searches_and_a_word(folder, said):
    folder.mkdir()
    (folder / "plans.sqlite").write_text("this is no database, " * 100)
    plan()
    text = said()
    assert "damaged" in text and "hpml doctor --clear-cache" in text


def test_a_folder_that_cannot_be_made_costs_a_word(monkeypatch, tmp_path, said):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path / "file" / "cache"))
    plan()
    assert "this plan cannot be cached" in said()


def test_prices_of_a_quick_look_may_differ_a_little():
    a = {"kernels: matmul": 1.0, "all_reduce: 4096": 50.0}
    assert _alike(a, {key: 0.9 * LIKE_PRICES * us for key, us in a.items()})
    assert not _alike(a, {**a, "all_reduce: 4096": 51.0 * LIKE_PRICES}) and not _alike(a, {})


def train(rank: int):
    """Two launches of two ranks with one cache folder."""
    logging.basicConfig(level=logging.INFO)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hpml").addHandler(handler)
    logging.getLogger("hpml").setLevel(logging.INFO)
    torch.manual_seed(0)
    model = torch.compile(Two(1), backend="hpml", options={"compiler": "eager"})
    loss = model(torch.randn(8, 32))
    loss.backward()
    return float(loss.detach()), any(FOUND in each for each in records), hpml_compiler.last_plan().graphs[0].decisions


def test_a_run_finds_what_the_run_before_it_decided(launch):
    (first, found, decisions), *_ = launch(train)
    assert not found
    graph_database.clear()  # which would be taken as it is, with nothing to plan
    (second, found, again), *_ = launch(train)
    assert found and second == first and again == decisions

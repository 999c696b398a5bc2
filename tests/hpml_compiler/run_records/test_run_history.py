"""Files of a run's ranks -> its attempts, series, events and state."""
from __future__ import annotations

import pytest

from hpml_compiler.run_records.record_file import RecordFile, file_of_rank
from hpml_compiler.run_records.run_history import read_run
from passes.errors import BadInput


def window(step, time, **more):
    return {"kind": "steps", "step": step, "steps": 10, "step_s": 0.1, "longest_s": 0.2, "time": time,
            "memory": {"resident": 100 * step}, "values": {"loss": 1.0 / step}, **more}


def event(name, time, text="", step=0):
    return {"kind": "event", "event": name, "time": time, "step": step, "text": text}


def written(folder, records, rank=0):
    file = RecordFile(file_of_rank(folder, rank))
    for record in records:
        file.write(record)
    file.close()


START = {"kind": "start", "time": 1.0, "step": 0, "ranks": 2}


def test_steps_that_an_attempt_repeats_count_once(tmp_path):
    written(tmp_path, [START, window(10, 2.0), window(20, 3.0), window(30, 4.0), {**START, "time": 9.0},
                       event("resumed", 9.1, step=20), window(30, 10.0, mfu=0.5), {"kind": "comparison", "step": 7}])
    run = read_run(tmp_path)
    assert run.series("loss") == [(10, 0.1), (20, 0.05), (30, 1 / 30)] and run.series("mfu") == [(30, 0.5)]
    assert run.series("resident")[-1] == (30, 3000) and run.value_names() == ["loss"]
    assert run.report("comparison") == {"kind": "comparison", "step": 7} and run.report("stages") is None
    assert [(each["event"], each["text"]) for _, each in run.events()] == [
        ("restart", "the attempt before was killed: attempt 2 starts on 2 ranks"), ("resumed", "")]


def test_what_all_ranks_say_is_listed_once_and_each_failure_by_itself(tmp_path):
    for rank in (0, 1):
        written(tmp_path, [START, event("stall", 2.0 + rank, "step 7 took 9 s", 7), event("failed", 3.0, "ValueError")], rank)
    assert [(rank, each["event"]) for rank, each in read_run(tmp_path).events()] == [
        (0, "stall"), (0, "failed"), (1, "failed")]


@pytest.mark.parametrize(("records", "now", "state"), [
    ([window(10, 100.0)], 120.0, "running"),
    ([window(10, 100.0)], 200.0, "silent"),
    ([window(10, 100.0, step_s=30.0)], 200.0, "running"),  # steps of 30 s
    ([event("failed", 3.0)], 4.0, "failed"),
    ([event("failed", 3.0), {"kind": "end", "time": 4.0, "how": "ended"}], 1e9, "failed"),  # the interpreter's end closes it
    ([window(10, 100.0), {"kind": "end", "time": 101.0, "how": "ended"}], 1e9, "ended"),
])
def test_state(tmp_path, records, now, state):
    written(tmp_path, [START, *records])
    assert read_run(tmp_path).state(lambda: now) == state


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no run was recorded here"):
        read_run(tmp_path)
    written(tmp_path, [window(1, 1.0)])
    with pytest.raises(BadInput, match="have no start"):
        read_run(tmp_path)

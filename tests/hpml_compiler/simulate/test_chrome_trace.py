"""The trace against the trace event format and Perfetto's requirements."""
from __future__ import annotations

import json

import pytest

from hpml_compiler.simulate import TimedStage, simulate
from hpml_compiler.simulate.chrome_trace import trace_json
from tests.hpml_compiler.simulate.toy import chain_plan


@pytest.mark.parametrize("options", [{}, {"recompute": "full", "microbatches": 2},
                                     {"stages": [TimedStage(10, 20, 1, reduce_us=3, optimizer_us=2)] * 2, "microbatches": 4}])
def test_every_event_is_whole_named_and_alone_on_its_thread(options):
    found = simulate(chain_plan(3), **options)
    events = json.loads(trace_json(found))["traceEvents"]
    names = {(e["pid"], e["name"]) for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(found.events) > 0
    for pid in range(len(found.ranks_of_lane)):
        assert {(pid, "process_name"), (pid, "thread_name")} <= names
        for tid in (0, 1):
            own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (pid, tid))
            assert all(a[1] <= b[0] + 1e-6 for a, b in zip(own, own[1:]))
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and e["name"] and e["cat"] for e in spans)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(found.step_us)
    counters = [e for e in events if e["ph"] == "C"]
    assert max(e["args"]["bytes"] for e in counters) == found.peak_bytes

"""Export a simulation in the JSON trace event format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process per lane, a thread per stream, a complete event ("X", in µs) per task, and a counter ("C") of the bytes in memory.
Format: "Trace Event Format", Google, 2016.
"""
from __future__ import annotations

import json
from typing import Any

from hpml_compiler.simulate.simulation import Simulation, format_ranks

THREADS = ("compute", "communication")


def trace(simulation: Simulation) -> dict[str, Any]:
    """The trace as a JSON object: `traceEvents`, the time unit for display, and the simulation's summary."""
    found: list[dict[str, Any]] = []
    for lane, ranks in enumerate(simulation.ranks_of_lane):
        found.append({"ph": "M", "pid": lane, "tid": 0, "name": "process_name", "args": {"name": format_ranks(ranks)}})
        found.append({"ph": "M", "pid": lane, "tid": 0, "name": "process_sort_index", "args": {"sort_index": lane}})
        found += [{"ph": "M", "pid": lane, "tid": tid, "name": "thread_name", "args": {"name": name}}
                  for tid, name in enumerate(THREADS)]
    found += [
        {"ph": "X", "pid": e.lane, "tid": THREADS.index(e.stream), "name": e.name, "cat": e.kind, "ts": e.start_us,
         "dur": e.stop_us - e.start_us} for e in simulation.events
    ]
    found += [{"ph": "C", "pid": simulation.fullest_lane, "tid": 0, "name": "memory", "ts": us, "args": {"bytes": nbytes}}
              for us, nbytes in simulation.memory]
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": simulation.summary()}


def trace_json(simulation: Simulation) -> str:
    """`trace` as strict JSON text."""
    return json.dumps(trace(simulation), allow_nan=False) + "\n"

"""Simulate the timeline of one step: tasks on the streams of a rank, and the bytes that are live meanwhile.

`step_graph` describes a rank's work in plain numbers; `rank_program` puts it in order; `event_simulator` runs it;
`step_timeline` reports time. `memory/` counts bytes, in program order. Nothing here knows of plans or solvers.
"""

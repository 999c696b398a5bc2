"""One step in time: what runs when on the streams of a rank, and which bytes live meanwhile.

`step_graph` says what a rank does, in plain numbers; `program` puts it in order; `events` runs it; `liveness` and `assembly`
say what is held and where the time went. Planner and simulator share it; nothing here knows of plans or solvers.
"""

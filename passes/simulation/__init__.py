"""The timeline of one step: what runs when on the streams of a rank, and which bytes are live meanwhile.

`step_graph` says what a rank does, in plain numbers; `rank_program` puts it in order; `event_simulator` runs it;
`storage_liveness` and `step_timeline` say what is held and where the time went. It knows nothing of plans or solvers.
"""

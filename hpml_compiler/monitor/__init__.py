"""What a run takes, beside what its plan predicted: see docs/monitoring.md.

- classes: the class of work (matmul, collective, ...) that a profiler's event belongs to.
- prediction: what the plans predict for the graphs that a step ran.
- steps: what lies between two optimizer steps, and how long it took.
- profiled: one step under torch's profiler: its time by class, its peak of tensor memory.
- held: bytes of parameters, gradients and optimizer state.
- report: predicted beside measured, as a record and as text. tensorboard: as scalars.
- schedule: which steps are measured, which one is profiled. monitor: all of it together, for one process.
- hooks: how a run tells the monitor what it does.
- stages: what the stages of a pipeline take, beside what they were cut by.
- stage_events: a step of a pipeline as it was measured, of all ranks.
"""

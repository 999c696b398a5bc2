"""Measured steps beside what their plans predicted: see docs/monitoring.md.

- kernel_classes: the class of work (matmul, collective, ...) that a profiler's event belongs to.
- prediction: the predicted time and bytes of the graphs that a step ran.
- step_recorder: the time between two optimizer steps, by graph.
- profiled_step: one step under torch's profiler: its time by class, its peak of tensor memory. profile_trigger: when.
- report: predicted beside measured, as a record and as text. tensorboard_scalars: as scalars.
- measured_window: which steps are measured. monitor: all of it together, for one process.
- hooks: how a run tells the monitor what it does.
- stage_monitor: times of the stages of a pipeline, beside those they were cut by. stage_events: one measured step of all ranks.
"""

"""Compare measured steps with the predictions of their plans: see docs/monitoring.md.

- kernel_classes: the class of work (matmul, collective, ...) of a profiler event.
- prediction: the predicted time and bytes of the graphs that a step ran.
- step_recorder: the time between two optimizer steps, by graph.
- profiled_step: one step under torch's profiler: time by class, peak of tensor memory. profile_trigger: which step.
- report: predicted and measured figures, as a record and as text. tensorboard_scalars: as TensorBoard scalars.
- measured_window: choice of the steps to measure. monitor: the monitor of one process.
- hooks: calls of the monitor around compiled graphs and optimizer steps.
- stage_monitor: measured and predicted times of pipeline stages. stage_events: one measured pipeline step of all ranks.
"""

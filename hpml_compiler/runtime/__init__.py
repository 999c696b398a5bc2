"""Execution: parameters and batches that live on several ranks, and the compiled graphs that use them.

From the ground up; each folder imports those before it only:

- process: the device and the process group of this rank.
- watchdog: heartbeats of all ranks, and which rank is to blame for a hang or an error.
- consistency: equal graphs, inputs, parameters and random numbers on all ranks.
- placements: placements that DTensor lacks, sharding and gathering.
- dtensor: `PlacedTensor`, the DTensor that a script may use as the whole tensor.
- batch: rows of a batch on each rank. optimizer: steps on sharded parameters.
- install: sharded parameters in the place of the model's own.
- program: the loop over microbatches and the stages of a pipeline.
"""

"""What runs: parameters and batches that live on several ranks, and the compiled graphs that use them.

- placed: `PlacedTensor`, the DTensor that a script may use as the whole tensor; routes, eager, local_ops, foreach and
  whole are its ways to run an op.
- parameters: `install` puts placed parameters into a model while Dynamo compiles it; rebinding: and into the script's
  own references.
- inputs: `take_out_markers` makes inputs that were placed before plain, for the compiler.
- local_views: local parts, and gradients, at each call.
- optimizer_step: optimizers. rows: batches. world: the ranks.
- microbatches, pipelined, stages: a step in microbatches, and through stages; stage_times: when what was done, by a clock.
- messages: what ranks of a pipeline send each other. stand_in: what a rank that has failed does for its peers.
"""

"""Joint planning: mesh, stages, microbatches, recomputation and ZeRO of a step, as far as the options leave them open."""

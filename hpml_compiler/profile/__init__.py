"""`hpml profile`: measure kernels, collectives and runtime overheads on the present devices for the cost model."""

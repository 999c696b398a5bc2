"""Pipeline parallelism: the chain of blocks, its cut into stages, and the schedules."""

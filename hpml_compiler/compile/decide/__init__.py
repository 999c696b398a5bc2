"""Decisions that all ranks share: rank 0 plans or loads a plan, and the other ranks receive it."""

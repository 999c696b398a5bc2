"""Decisions that all ranks share: rank 0 plans or obeys a plan, and the others receive it."""

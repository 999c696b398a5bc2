"""Smoke test that `hpml doctor` runs under torchrun: one all_reduce over gloo, checked."""
from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    size = dist.get_world_size()
    expected = size * (size + 1) / 2
    dist.destroy_process_group()
    if value.item() != expected:
        raise RuntimeError(f"all_reduce over {size} ranks gave {value.item()}, not {expected}")


if __name__ == "__main__":
    main()

"""Memory of this process now, as figures of a record; nothing waits for a device."""
from __future__ import annotations

import psutil
import torch


class DeviceMemory:
    """On CUDA, torch's own counters. On a CPU, torch has none: the resident memory of the process."""

    def __init__(self, device_type: str) -> None:
        self.on_device = device_type == "cuda"
        self._process = psutil.Process()

    def now(self) -> dict[str, int]:
        """Bytes by name: resident, and on CUDA allocated, reserved and the peak of allocated."""
        found = {"resident": int(self._process.memory_info().rss)}
        if self.on_device:
            found |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(),
                      "peak": torch.cuda.max_memory_allocated()}
        return found

"""Lightning strategy: `Trainer(strategy=HpmlStrategy())` sees one device and runs on all ranks."""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.integrations.rank_zero_gather import barrier, gathered
from hpml_compiler.runtime.process.world_group import control_group, ensure_process_group
from passes.errors import MissingDependency

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError:
    try:
        from pytorch_lightning.strategies import SingleDeviceStrategy  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependency("Lightning is not installed", "hpml_compiler.integrations.lightning",
                                "pip install lightning") from error


class HpmlStrategy(SingleDeviceStrategy):  # pyright: ignore[reportGeneralTypeIssues]
    """Strategy for models compiled with backend="hpml": every rank runs the single-device script.

    All ranks get the same batches (no DistributedSampler), the model is not wrapped in DDP, and losses and metrics are not
    reduced, since they are those of the global batch. Checkpoints are gathered by all ranks and written by rank 0, with the
    same names and shapes as on one device. Rank 0 logs.
    """

    strategy_name = "hpml"

    def __init__(self, device: Any = None, **kwargs: Any) -> None:
        ensure_process_group()
        super().__init__(device=_own_device() if device is None else device, **kwargs)
        if dist.is_initialized():
            self.global_rank, self.local_rank = dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        held = [obj]
        dist.broadcast_object_list(held, src, group=control_group())
        return held[0]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return gathered(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return gathered(super().optimizer_state(optimizer))

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(gathered(checkpoint), filepath, storage_options)
        barrier()


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

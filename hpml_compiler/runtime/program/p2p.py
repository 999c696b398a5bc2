"""Point-to-point communication of a pipeline: sends between stages, shared results, and agreement on failures."""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.runtime.placements.gather_parts import in_memory_as
from hpml_compiler.runtime.process.compute_device import sends_through_host
from hpml_compiler.runtime.process.device_clock import Waits
from hpml_compiler.runtime.program.stage_errors import carried, stage_error
from hpml_compiler.runtime.program.stage_timer import note_sent
from passes.session_state import state_of


@dataclass(frozen=True)
class StageFailure:
    """A failure of this rank, with its time. stage, microbatch: None before the first microbatch."""

    what: str
    error: Exception
    stage: int | None = None
    microbatch: int | None = None
    when: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return f"{self.what} failed: {type(self.error).__name__}: {self.error}"


class P2P:
    """Communication between the ranks of a pipeline. ranks: of the group, by place in the pipeline. everybody: a CPU
    group of all ranks, where several ranks share a stage."""

    def __init__(self, ranks: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None,
                 everybody: dist.ProcessGroup | None = None):
        self.ranks, self.device, self.group, self.everybody = tuple(ranks), device, group, everybody
        self.wire = torch.device("cpu") if sends_through_host(device, group) else device
        """The device that messages are sent from and received on."""
        self.sent: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        """The last sends to each rank, with the buffers that they read."""

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Start a message. The one before it to this rank is waited for, so that the memory of no more than one is in use."""
        self._wait(to)
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1).to(self.wire)
            self.sent.setdefault(to, []).append((dist.isend(flat, self.ranks[to], self.group), flat))
            note_sent(flat.nbytes)

    def _wait(self, to: int) -> None:
        for work, _ in self.sent.pop(to, ()):
            with state_of(Waits).waiting():
                work.wait()

    def receive(self, like: Sequence[torch.Tensor], source: int) -> Received:
        """like: fakes of the tensors to come; these are contiguous, whatever the fakes' strides."""
        buffers = [torch.empty(tuple(x.shape), dtype=x.dtype, device=self.wire) for x in like]
        return Received([dist.irecv(x.view(-1), self.ranks[source], self.group) for x in buffers], buffers, like, self.device)

    def share(self, values: Sequence[torch.Tensor | None], owners: Sequence[int], like: Sequence[torch.Tensor],
              rank: int) -> list[torch.Tensor]:
        """Broadcast each value from the rank that has it. owners: these ranks, by place in the pipeline. like: fakes of the
        values."""
        found = list(values)
        for owner in sorted(set(owners)):
            own = [k for k, each in enumerate(owners) if each == owner]
            for dtype in dict.fromkeys(like[k].dtype for k in own):
                places = [k for k in own if like[k].dtype == dtype]
                sizes = [like[k].numel() for k in places]
                flat = (torch.cat([_there(found[k]).reshape(-1) for k in places]) if rank == owner
                        else torch.empty(sum(sizes), dtype=dtype, device=self.device))
                with state_of(Waits).waiting():
                    dist.broadcast(flat.view(torch.uint8), self.ranks[owner], self.group)
                if rank == owner:
                    note_sent(flat.nbytes * (len(self.ranks) - 1))
                if rank != owner:
                    for k, part in zip(places, flat.split(sizes)):
                        x = _like(part.view(tuple(map(int, like[k].shape))), like[k], int(like[k].storage_offset()))
                        # Not a view: autograd refuses writes to a view that it has not made.
                        found[k] = x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
        return [_there(x) for x in found]

    def agree(self, failed: StageFailure | None) -> None:
        """Raise the first failure of any rank on all ranks, as an error of the same class."""
        group, device = (self.group, self.device) if self.everybody is None else (self.everybody, torch.device("cpu"))
        any_failed = torch.tensor([failed is not None], dtype=torch.int32, device=device)
        with state_of(Waits).waiting():
            dist.all_reduce(any_failed, dist.ReduceOp.MAX, group)
        if not int(any_failed):
            return
        rank = dist.get_rank()
        said: list[Any] = [None] * dist.get_world_size(group)
        own = None if failed is None else (
            failed.when, rank, str(failed), failed.stage, failed.microbatch, carried(failed.error))
        dist.all_gather_object(said, own, group)
        _, first, text, stage, microbatch, error = min((each for each in said if each is not None), key=lambda each: each[:2])
        here = failed is not None and first == rank
        raise stage_error(
            failed.error if failed is not None and here else error, first, stage, microbatch, f"rank {first}: {text}",
            f"rank {rank}, in a pipeline",
            "see the original error above" if here else f"look at rank {first}",
        ) from (None if failed is None else failed.error)

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for to in list(self.sent):
            self._wait(to)


@dataclass
class Received:
    works: list[Any]
    buffers: list[torch.Tensor]
    like: Sequence[torch.Tensor]
    device: torch.device

    def wait(self) -> list[torch.Tensor]:
        with state_of(Waits).waiting():
            for work in self.works:
                work.wait()
        return [_like(x.to(self.device), fake) for x, fake in zip(self.buffers, self.like)]


def _there(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None, "a stage sends only values that it has computed"
    return value


def _like(buffer: torch.Tensor, fake: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A received tensor with the strides that the stage's graph expects."""
    if tuple(buffer.stride()) == tuple(fake.stride()) and not offset:
        return buffer
    return in_memory_as(buffer, tuple(map(int, fake.shape)), tuple(map(int, fake.stride())), offset)

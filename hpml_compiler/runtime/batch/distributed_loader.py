"""`distribute(loader)`: data loader wrapper that shards each batch by rows over the ranks."""
from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.batch.batch_pytree import map_named_tensors, named_tensors
from hpml_compiler.runtime.batch.batch_shard import shard_batch
from hpml_compiler.runtime.batch.loader_position import LoaderPosition
from hpml_compiler.runtime.batch.per_rank_batch import Ended, Padding, PerRankBatches
from hpml_compiler.runtime.consistency.input_check import EVERY
from hpml_compiler.runtime.process.world_group import control_group, ensure_process_group, world_mesh
from hpml_compiler.runtime.watchdog.activity_scope import activity
from passes.errors import BadInput

log = logging.getLogger(__name__)
WhoseRows = Literal["same", "own"]


def distribute(loader: Iterable[Any], rows: WhoseRows | None = None, pad: Padding = None) -> Iterable[Any]:
    """Wrap an iterable of batches so that each rank stores only its rows of the global batch.

    rows="same": every rank iterates the same batches in the same order, as a script written for one device does (a seed
    before a shuffling loader), and each takes its share of the rows. Checked by checksum on the first batches of each
    iteration and occasionally later. A tensor whose first dim is not divisible by the number of ranks is stored whole
    on every rank, with a warning; a graph then computes an unequal share of its rows on each.
    rows="own": every rank iterates rows of its own, as a script written for DDP does. The global batch is the concatenation
    of all of them in order of ranks, so losses and gradients are those of all rows, also where the last batches or the
    numbers of batches differ. All tensors of a batch have one row per sample.
    None: "own" where the loader has a sampler that splits rows by rank (`DistributedSampler` and similar), else "same".
    pad: for rows="own", name of a tensor -> fill value where ranks padded to different lengths:
    `{"input_ids": 0, "attention_mask": 0, "labels": -100}`; in a tuple, the name is the index: "0".

    A batch is a tensor or any nest of tensors in lists, tuples, dicts and dataclasses; other leaves and 0-dim tensors stay
    as they are. Its tensors become DTensors, `Shard(0)` over all ranks, that the script can use as the whole tensor.
    Length and attributes (`loader.sampler.set_epoch`) are those of `loader`; `passes` is the
    number of the present pass, from 0. With one rank, batches are left as they are.
    Raises BadInput where `rows` contradicts the loader's sampler.
    """
    return _DistributedLoader(loader, rows, pad)


def distribute_batch(batch: Any, *, rows: WhoseRows, pad: Padding = None) -> Any:
    """Shard one batch over the ranks, as `distribute` does; all ranks must call this together, each with its batch.

    For batches that do not come from a wrapped loader: rows="own" concatenates the ranks' batches to the global batch,
    rows="same" takes this rank's rows of a batch that is equal on all ranks. Tensors that are distributed already stay as
    they are.
    """
    _check_rows(rows)
    if ensure_process_group() == 1:
        return batch
    return PerRankBatches(pad).join(batch) if rows == "own" else _BatchSlicer().of(batch)


def _check_rows(rows: Any) -> None:
    if rows not in ("same", "own"):
        raise BadInput(f"rows={rows!r} is not known", "hpml_compiler.distribute",
                       "'own' if each rank has other rows, 'same' if all ranks have the same batch")


class _DistributedLoader:
    def __init__(self, loader: Iterable[Any], rows: WhoseRows | None, pad: Padding) -> None:
        if rows is not None:
            _check_rows(rows)
        self._loader, self._asked, self._pad = loader, rows, pad
        self._share, self._position = _BatchSlicer(), LoaderPosition(loader)
        self._drawn: _PerRankRng | None = None
        self._resumed_rng: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_position"):  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def passes(self) -> int:
        """Number of passes over the data before the present one: the epoch, from 0."""
        return self._position.passes

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for `hpml_compiler.Checkpointer`; with rows="own", of this rank."""
        return {**self._position.state_dict(), "random": None if self._drawn is None else self._drawn.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position: the next iteration begins there."""
        self._position.load_state_dict(state)
        self._resumed_rng = state["random"]

    def __iter__(self) -> Iterator[Any]:
        world = ensure_process_group()
        if world == 1:
            yield from self._position.iterate()
            return
        if self._whose(world) == "own":
            yield from self._joined()
            return
        batches = _noted(self._position.iterate())
        number = 0
        while (batch := next(batches, Ended)) is not Ended:
            if number & (number - 1) == 0 or number % EVERY == 0:
                _check_equal(batch, number)
            yield self._share.of(batch)
            number += 1

    def _whose(self, world: int) -> str:
        shares = sharing_sampler(self._loader)
        if shares is None or shares == 1:
            return self._asked or "same"
        if shares != world:
            raise BadInput(f"the loader's sampler divides the rows among {shares} ranks, but there are {world}",
                           "hpml_compiler.distribute", f"create it with num_replicas={world}")
        if self._asked == "same":
            raise BadInput("rows='same', but the loader's sampler gives each rank other rows", "hpml_compiler.distribute",
                           "remove rows='same' or the sampler")
        return "own"

    def _joined(self) -> Iterator[Any]:
        joiner, drawn = PerRankBatches(self._pad), _PerRankRng(self._resumed_rng)
        self._drawn, self._resumed_rng = drawn, None
        with drawn:
            batches = _noted(self._position.iterate())
            batch = next(batches, Ended)
        if not _different(batch) and batch is not Ended and dist.get_rank() == 0:
            log.warning("the first batch is the same on every rank, so rows='own' counts it %d times; shard the data by rank, "
                        "or use rows='same'", dist.get_world_size())
        while (joined := joiner.join(batch)) is not Ended:
            yield joined
            with drawn:
                batch = next(batches, Ended)


def _noted(batches: Iterator[Any]) -> Iterator[Any]:
    """Iterate the batches; while a rank waits for one, its status is "loading a batch"."""
    while True:
        with activity("loading a batch"):
            batch = next(batches, Ended)
        if batch is Ended:
            return
        yield batch


class _PerRankRng:
    """Context manager with an RNG state for this rank's data loading, separate from the script's RNG state.

    Ranks may draw different amounts of random numbers for their rows (shuffling, augmentation), but must draw the same ones
    in the model (dropout masks)."""

    def __init__(self, state: torch.Tensor | None = None) -> None:
        self.state = torch.get_rng_state() if state is None else state

    def __enter__(self) -> None:
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *_: Any) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self.outside)


def sharing_sampler(loader: Any) -> int | None:
    """Number of ranks that a loader's sampler splits the rows over; None if it does not split them.

    Reads `num_replicas` (torch's DistributedSampler) or `num_processes` (accelerate's shards) of the loader, its sampler,
    batch sampler or dataset, or of a wrapped loader.
    """
    seen: list[Any] = []
    queue = [loader]
    while queue and len(seen) < 20:
        item = queue.pop(0)
        if item is None or any(item is other for other in seen):
            continue
        seen.append(item)
        held = getattr(item, "__dict__", {})
        for name in ("num_replicas", "num_processes"):
            if isinstance(held.get(name), int):
                return held[name]
        queue.extend(held.get(name) for name in ("sampler", "batch_sampler", "base_dataloader", "base_loader", "dataset",
                                                 "_loader"))
    return None


class _BatchSlicer:
    """Slices this rank's rows out of batches that are equal on all ranks."""

    def __init__(self) -> None:
        self.warned = False

    def of(self, batch: Any) -> Any:
        return map_named_tensors(self._rows, batch)

    def _rows(self, _name: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        mesh = world_mesh()
        if tensor.dim() and tensor.shape[0] % mesh.size() == 0:
            return shard_batch(tensor, mesh)
        if tensor.dim() and not self.warned:
            self.warned = True
            log.warning("a tensor with %d rows is stored whole on every rank, since %d ranks do not divide it; use a batch "
                        "size that is a multiple of the ranks, and drop_last=True", tensor.shape[0], mesh.size())
        return tensor


def _different(batch: Any) -> list[int]:
    """Ranks whose batch differs from rank 0's, by checksum; `Ended` counts as an empty batch."""
    found = list(named_tensors(batch).values())
    checksum = zlib.crc32(repr([tuple(tensor.shape) for tensor in found]).encode())
    for tensor in found:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
        checksum = zlib.crc32(data.numpy().tobytes(), checksum)
    mine = torch.tensor([checksum])
    sums = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with activity("comparing a batch with the other ranks'"):
        dist.all_gather(sums, mine, group=control_group())
    return [rank for rank, other in enumerate(sums) if int(other) != int(sums[0])]


def _check_equal(batch: Any, number: int) -> None:
    different = _different(batch)
    if different:
        raise BadInput(
            "the batch differs between ranks, but hpml_compiler.distribute expects the same batch on all ranks",
            f"batch {number} of the loader on rank {dist.get_rank()}: other data on ranks {different} than on rank 0",
            "seed the loader's shuffling with the same value on all ranks (torch.manual_seed); or, if each rank has its "
            "own rows (such as an IterableDataset sharded by rank), use distribute(loader, rows='own')",
        )

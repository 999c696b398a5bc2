"""Write one checkpoint: plan who writes which block (DCP's planner), write, gather the hashes, write the manifest, rename.

All ranks call `write` together, on a group of its own, from whichever thread. Rank 0 decides; an error on any rank is the
result on all of them.
"""
from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from hpml_compiler.checkpoints.checkpoint_folder import CheckpointFolder, HashingStream, name_of
from hpml_compiler.checkpoints.manifest import MANIFEST, STATE, Manifest
from hpml_compiler.checkpoints.staged_tensors import StagedParts
from hpml_compiler.runtime.weights.safetensors_files import write_safetensors
from passes.errors import BadInput, HpmlError

log = logging.getLogger("hpml")


@dataclass
class Saving:
    """One checkpoint to write. state: values without tensors, equal on all ranks. own: those of this rank. keep: number of
    checkpoints that stay in the folder."""

    step: int
    staged: StagedParts
    state: dict[str, Any]
    own: dict[str, Any]
    writer: dict[str, Any]
    keep: int | None = None


@dataclass
class _Share:
    """Message of a rank to rank 0. plan: blocks that it has; then files: those it has written, and where each block is."""

    plan: Any = None
    state: str = ""
    own: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[MetadataIndex, str] = field(default_factory=dict)
    problem: HpmlError | None = None


@dataclass
class _Begun:
    """The plan of rank 0: each rank's blocks, and the folder that they are written to."""

    work: str
    plans: list[SavePlan] = field(default_factory=list)
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    problem: HpmlError | None = None


class CheckpointWriter:
    """Writes checkpoints to a folder. group: of all ranks, for this alone; None with one rank."""

    def __init__(self, folder: CheckpointFolder, group: dist.ProcessGroup | None) -> None:
        self._folder, self._group = folder, group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._ranks = dist.get_world_size(group) if group is not None else 1

    def write(self, saving: Saving) -> HpmlError | None:
        """Write a checkpoint; returns what went wrong."""
        work = self._folder.writing_name(saving.step, os.urandom(4).hex())
        state = json.dumps(saving.state, allow_nan=False)
        shares = self._gather(_Share(saving.staged.plan, state, saving.own))
        begun = _begin(self._folder, work, shares, saving.step) if shares else None
        todo, work, problem = self._scatter(begun)
        if problem is None:
            written = self._gather(self._write_share(work, todo, saving))
            problem = self._share_out(self._end(work, saving, shares, written, begun.metadata) if begun else None)
        if problem is not None and self._rank == 0:
            log.error("%s", problem)
        return problem

    def _write_share(self, work: str, todo: Sequence[WriteItem], saving: Saving) -> _Share:
        share = _Share()
        files: dict[str, dict[str, MetadataIndex]] = defaultdict(dict)
        for item in todo:
            group, _, key = item.index.fqn.partition("/")
            block = 0
            while key in files[path := self._file_of(group, block)]:  # torch's reader takes one block of a tensor per file
                block += 1
            files[path][key] = item.index
            share.places[item.index] = path
        path = ""
        try:
            for path, keys in files.items():
                self._folder.make(work, path.rpartition("/")[0])
                offsets = {key: {"saved_offsets": list(index.offset or ())} for key, index in keys.items()}
                with self._folder.write(work, path) as stream:
                    write_safetensors(stream, {key: saving.staged.parts[index] for key, index in keys.items()},
                                      {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)})
                share.files[path] = _record(stream)
        except (OSError, HpmlError) as error:
            share.problem = _cannot_write(error, saving.step, f"rank {self._rank}, {self._folder.path(work, path)}")
        return share

    def _file_of(self, group: str, block: int) -> str:
        """Files of one rank and the whole model are named as Hugging Face does."""
        more = f"-{block + 1}" if block else ""
        return f"{group}/{group}-{self._rank + 1:05}-of-{self._ranks:05}{more}.safetensors"

    def _end(self, work: str, saving: Saving, shares: list[_Share], written: list[_Share], metadata: Metadata,
             ) -> HpmlError | None:
        """On rank 0: write the state and the manifest, give the checkpoint its name, remove old ones."""
        problem = next((share.problem for share in written if share.problem is not None), None)
        try:
            if problem is not None:
                self._folder.remove(work)
                return problem
            manifest = Manifest(saving.step, saving.writer, same=saving.staged.same)
            places = {index: path for share in written for index, path in share.places.items()}
            manifest.note(metadata, places)
            for share in written:
                manifest.files |= share.files
            owns = [share.own for share in shares]
            state = {**saving.state, "ranks": owns[:1] if all(own == owns[0] for own in owns) else owns}
            with self._folder.write(work, STATE) as stream:
                stream.write(json.dumps(state, allow_nan=False).encode())
            manifest.files[STATE] = _record(stream)
            seen = self._folder.files(work)
            for path, record in manifest.files.items():
                if seen.get(path) != record["bytes"]:
                    return BadInput(f"the checkpoint of step {saving.step} is not complete: rank 0 does not see a file of "
                                    "another rank", self._folder.path(work, path), "give a folder that all nodes share")
            with self._folder.write(work, MANIFEST) as stream:
                stream.write(manifest.to_bytes())
            self._folder.complete(work, saving.step)
            self._remove_old(saving)
        except OSError as error:
            return _cannot_write(error, saving.step, self._folder.path(work))
        return None

    def _remove_old(self, saving: Saving) -> None:
        older = [step for step in self._folder.steps() if step < saving.step]
        for step in older[:max(0, len(older) - (saving.keep - 1))] if saving.keep is not None else ():
            self._folder.remove(name_of(step))

    def _gather(self, mine: _Share) -> list[_Share]:
        """The messages of all ranks, on rank 0."""
        if self._group is None:
            return [mine]
        found: list[Any] | None = [None] * self._ranks if self._rank == 0 else None
        dist.gather_object(mine, found, group=self._group, group_dst=0)
        return found or []

    def _scatter(self, begun: _Begun | None) -> tuple[Sequence[WriteItem], str, HpmlError | None]:
        """Each rank's blocks to write, the folder, and what is wrong. begun: on rank 0, result of `_begin`."""
        messages = None
        if begun is not None:
            messages = [(begun.plans[rank].items if begun.plans else (), begun.work, begun.problem)
                        for rank in range(self._ranks)]
        if self._group is None:
            assert messages is not None
            return messages[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, messages, group=self._group, group_src=0)
        return mine[0]

    def _share_out(self, problem: HpmlError | None) -> HpmlError | None:
        if self._group is None:
            return problem
        message = [problem]
        dist.broadcast_object_list(message, group=self._group, group_src=0)
        return message[0]


def _begin(folder: CheckpointFolder, work: str, shares: list[_Share], step: int) -> _Begun:
    """On rank 0: check that ranks agree, plan, and create the folder."""
    different = [rank for rank, share in enumerate(shares) if share.state != shares[0].state]
    if different:
        what = _first_difference(shares[0].state, shares[different[0]].state)
        return _Begun(work, problem=BadInput(
            f"the state to save at step {step} differs between ranks: {what}", f"rank {different[0]}",
            "call the checkpointer at the same step on all ranks, with the same state of schedulers and of `extra`"))
    try:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        plans, metadata = planner.create_global_plan([share.plan for share in shares])
        if folder.local is False:
            _clear(folder, work)
        folder.make(work)
    except (OSError, ValueError) as error:
        return _Begun(work, problem=_cannot_write(error, step, folder.path(work)))
    return _Begun(work, plans, metadata)


def _clear(folder: CheckpointFolder, work: str) -> None:
    """Remove an earlier checkpoint of this step where there is no rename."""
    if folder.files(work):
        folder.remove(work)


def _first_difference(one: str, other: str) -> str:
    at = next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return f"...{one[max(0, at - 40):at + 20]}... and ...{other[max(0, at - 40):at + 20]}..."


def _record(stream: HashingStream) -> dict[str, Any]:
    return {"bytes": stream.nbytes, "blake2b": stream.digest}


def _cannot_write(error: Exception, step: int, where: str) -> HpmlError:
    if isinstance(error, HpmlError):
        return error
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return BadInput(f"the checkpoint of step {step} cannot be written: {why}", where,
                    "free space there or keep fewer (keep=...); the checkpoints before it are complete")


"""Read a checkpoint: find the newest that is whole, and load blocks of tensors (DCP's planner) into parts."""
from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from hpml_compiler.checkpoints.checkpoint_folder import CheckpointFolder, name_of
from hpml_compiler.checkpoints.manifest import STATE, Damage, Manifest, damage, read_manifest
from hpml_compiler.runtime.process.world_group import from_all_ranks, this_rank, world_size
from hpml_compiler.runtime.weights.block_reader import read_blocks
from hpml_compiler.runtime.weights.safetensors_files import DTYPES
from passes.errors import BadInput

log = logging.getLogger("hpml")


def newest_whole(folder: CheckpointFolder) -> Manifest | None:
    """The newest checkpoint without damage, the same on all ranks; None if the folder has none at all. Damaged ones are passed
    over with a warning. Raises BadInput if there are only damaged ones."""
    steps: list[int] = from_all_ranks(folder.steps() if this_rank() == 0 else [])[0]
    first = ""
    for step in reversed(steps):
        found, problem = _verified(folder, step)
        if problem is None:
            return found
        first = first or f"{folder.path(name_of(step))}: {problem}"
        if this_rank() == 0:
            log.warning("the checkpoint of step %d is damaged: %s; the one before is taken instead", step, problem)
    if steps:
        raise BadInput(f"all {len(steps)} checkpoints are damaged", first,
                       "restore them from a copy, or give another folder to start anew")
    return None


def _verified(folder: CheckpointFolder, step: int) -> tuple[Manifest | None, Damage | None]:
    """The manifest and the damage; each rank hashes its share of the files."""
    found = read_manifest(folder, step)
    mine = found if isinstance(found, Damage) else damage(folder, found, (this_rank(), world_size()))
    problem = next((each for each in from_all_ranks(mine) if each is not None), None)
    return (None if isinstance(found, Damage) else found), problem


class CheckpointReader:
    """Reads one checkpoint that was found whole."""

    def __init__(self, folder: CheckpointFolder, manifest: Manifest) -> None:
        self._folder, self.manifest = folder, manifest
        self._metadata, self._files = manifest.metadata()
        with folder.read(name_of(manifest.step), STATE) as stream:
            self.state: dict[str, Any] = json.loads(stream.read())

    @property
    def step(self) -> int:
        return self.manifest.step

    def names(self, group: str) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Dtypes and shapes of the tensors of a group ("model"), by name in it."""
        start = f"{group}/"
        return {name.removeprefix(start): (each.properties.dtype, each.size)  # type: ignore[union-attr]
                for name, each in self._metadata.state_dict_metadata.items() if name.startswith(start)}

    def described(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor by its full name."""
        each = self.manifest.tensors[self.manifest.same.get(name, name)]
        return DTYPES[each["dtype"]], tuple(each["shape"])

    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, or this rank's parts of them, by full name. Shapes are those of the checkpoint."""
        read_blocks(targets, self._metadata, self._files, lambda path: self._folder.read(name_of(self.manifest.step), path))

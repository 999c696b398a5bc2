"""List, verify and convert checkpoints, without the script that wrote them."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpml_compiler.checkpoints.checkpoint_folder import CheckpointFolder, name_of
from hpml_compiler.checkpoints.manifest import Damage, Manifest, damage, read_manifest
from hpml_compiler.checkpoints.read_checkpoint import CheckpointReader
from hpml_compiler.runtime.weights.safetensors_files import NAMES, Chunk
from hpml_compiler.runtime.weights.weights_folder import MOST_BYTES, WeightsFolder
from passes.errors import BadInput


@dataclass
class ListedCheckpoint:
    """One checkpoint of a folder. damage: what is wrong with it, "" if nothing was found."""

    step: int
    nbytes: int
    damage: str
    writer: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "bytes": self.nbytes, "damage": self.damage, **self.writer}


def listed(folder: CheckpointFolder, hashed: bool = False) -> Iterator[ListedCheckpoint]:
    """The checkpoints of a folder, ascending. hashed: read and hash every file, not only names and sizes."""
    for step in folder.steps():
        manifest = read_manifest(folder, step)
        nbytes = sum(folder.files(name_of(step)).values())
        if isinstance(manifest, Damage):
            yield ListedCheckpoint(step, nbytes, str(manifest), {})
        else:
            found = damage(folder, manifest, (0, 1) if hashed else None)
            yield ListedCheckpoint(step, nbytes, str(found or ""), manifest.writer)


def opened(path: str) -> CheckpointFolder:
    """The folder of checkpoints at a path. Raises BadInput if there are none."""
    folder = CheckpointFolder(path)
    if not folder.steps():
        raise BadInput("the folder has no checkpoints", path,
                       "give the folder of hpml_compiler.Checkpointer, which has folders step-00000100 and so on")
    return folder


def chosen(folder: CheckpointFolder, step: int | None) -> Manifest:
    """The manifest of a step, or of the newest checkpoint without damage. Raises BadInput if it is damaged or not there."""
    steps = folder.steps() if step is None else [step]
    if step is not None and step not in folder.steps():
        raise BadInput(f"there is no checkpoint of step {step}", folder.given,
                       f"give one of {', '.join(map(str, folder.steps()[-10:]))}")
    problem = ""
    for each in reversed(steps):
        manifest = read_manifest(folder, each)
        found = manifest if isinstance(manifest, Damage) else damage(folder, manifest)
        if not isinstance(manifest, Damage) and found is None:
            return manifest
        problem = problem or f"{folder.path(name_of(each))}: {found}"
    raise BadInput("the checkpoint is damaged" if len(steps) == 1 else f"all {len(steps)} checkpoints are damaged", problem,
                   "choose another step, or restore the file from a copy")


def convert(folder: CheckpointFolder, step: int | None, target: Path, dtype: torch.dtype | None = None,
            file_bytes: int = MOST_BYTES) -> tuple[int, int]:
    """Write the model of a checkpoint as one whole model in Hugging Face's layout, a tensor at a time. Returns the step and the
    number of tensors. dtype: of floating-point tensors. Names that stand for the same memory are written once, as Hugging Face
    does."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput("the target exists and is not an empty folder", str(target), "give a new folder")
    reader = CheckpointReader(folder, chosen(folder, step))
    same = {name.removeprefix("model/") for name in reader.manifest.same}
    chunks: dict[str, Chunk] = {name: (dtype if dtype is not None and kept.is_floating_point else kept, tuple(shape))
                                for name, (kept, shape) in reader.names("model").items() if name not in same}

    def value_of(name: str) -> torch.Tensor:
        saved, shape = reader.described(f"model/{name}")
        value = torch.empty(shape, dtype=saved)
        reader.load({f"model/{name}": value})
        return value.to(chunks[name][0])

    WeightsFolder(target, chunks, file_bytes).write(value_of)
    return reader.manifest.step, len(chunks)


def dtype_named(name: str) -> torch.dtype:
    """A dtype by torch's name or that of safetensors, such as bfloat16 or BF16."""
    found = next((dtype for dtype, short in NAMES.items() if name.lower() in (short.lower(), str(dtype)[6:])), None)
    if found is None or not found.is_floating_point:
        raise BadInput(f"{name!r:.40} is no floating-point dtype", "--dtype", "give float32, bfloat16, float16 or float64")
    return found

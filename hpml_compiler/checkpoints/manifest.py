"""Manifest of a checkpoint: its files with their hashes, its tensors with their blocks, and what wrote it."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpml_compiler.checkpoints.checkpoint_folder import CheckpointFolder, name_of, new_hash
from hpml_compiler.runtime.weights.safetensors_files import DTYPES, NAMES

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT, VERSION = "hpml checkpoint", 1


@dataclass(frozen=True)
class Damage:
    """One defect of a checkpoint. file: its path below the checkpoint."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


@dataclass
class Manifest:
    """files: path -> bytes and hash. tensors: name -> dtype, shape, and blocks with their file. same: name of a tensor -> name
    under which the same memory is saved. writer: versions, number of ranks, and the plan's stamp."""

    step: int
    writer: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**content, "seal": _seal(content)}).encode()

    def note(self, metadata: Metadata, files: Mapping[MetadataIndex, str]) -> None:
        """Take over the tensors of DCP's metadata. files: by tensor and offset, where a block was written."""
        for name, each in metadata.state_dict_metadata.items():
            assert isinstance(each, TensorStorageMetadata), "all tensors"
            blocks = [{"offsets": list(chunk.offsets), "sizes": list(chunk.sizes),
                       "file": files[MetadataIndex(name, chunk.offsets)]} for chunk in each.chunks]
            self.tensors[name] = {"dtype": NAMES[each.properties.dtype], "shape": list(each.size), "blocks": blocks}

    def metadata(self) -> tuple[Metadata, dict[MetadataIndex, tuple[str, str]]]:
        """The tensors as DCP's planners expect them, and each block's file and its key there."""
        described: dict[str, Any] = {}
        files = {}
        for name, source in [*((name, name) for name in self.tensors), *self.same.items()]:
            each, chunks = self.tensors[source], []
            for block in each["blocks"]:
                offsets = torch.Size(block["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(block["sizes"])))
                files[MetadataIndex(name, offsets)] = block["file"], source.partition("/")[2]
            described[name] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[each["dtype"]]), torch.Size(each["shape"]),
                                                    chunks)
        return Metadata(described), files


def _seal(content: Mapping[str, Any]) -> str:
    hashed = new_hash()
    hashed.update(json.dumps(content, sort_keys=True).encode())
    return hashed.hexdigest()


def read_manifest(folder: CheckpointFolder, step: int) -> Manifest | Damage:
    """The manifest of a checkpoint, or what is wrong with it."""
    try:
        with folder.read(name_of(step), MANIFEST) as stream:
            written = stream.read()
        content = json.loads(written)
        same = json.dumps(content).encode() == written
        seal = content.pop("seal")
    except FileNotFoundError:
        return Damage(MANIFEST, "is missing: the checkpoint is not complete")
    except (ValueError, KeyError, AttributeError, TypeError):
        return Damage(MANIFEST, "is not JSON as it was written")
    except OSError as error:
        return Damage(MANIFEST, f"cannot be read: {error.strerror or error}")
    if not same or seal != _seal(content):
        return Damage(MANIFEST, "was changed: its seal does not match")
    if content.pop("format") != FORMAT or content.pop("version") > VERSION:
        return Damage(MANIFEST, "was written by a newer release of hpml")
    found = Manifest(**content)
    if any(block["file"] not in found.files for each in found.tensors.values() for block in each["blocks"]):
        return Damage(MANIFEST, "names a file that is not part of the checkpoint")
    if found.step != step:
        return Damage(MANIFEST, f"is that of step {found.step}")
    return found


def damage(folder: CheckpointFolder, manifest: Manifest, share: tuple[int, int] | None = (0, 1)) -> Damage | None:
    """The first defect of a checkpoint's files. share: (k, n) hashes the k-th of n parts of the files; None hashes none."""
    name = name_of(manifest.step)
    there = folder.files(name)
    for path, known in manifest.files.items():
        if path not in there:
            return Damage(path, "is missing")
        if there[path] != known["bytes"]:
            return Damage(path, f"has {there[path]} bytes, not the {known['bytes']} that were written")
    if foreign := sorted(there.keys() - manifest.files.keys() - {MANIFEST}):
        return Damage(foreign[0], "is not part of the checkpoint")
    # Files in order of size, dealt in turns, so that ranks hash about as many bytes.
    largest = sorted(manifest.files, key=lambda path: (-manifest.files[path]["bytes"], path))
    for path in largest[share[0]::share[1]] if share is not None else ():
        try:
            digest = folder.digest(name, path)
        except OSError as error:
            return Damage(path, f"cannot be read: {error.strerror or error}")
        if digest != manifest.files[path]["blake2b"]:
            return Damage(path, "has other bytes than were written")
    return None

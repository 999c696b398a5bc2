"""The tensors in a folder of safetensors files: Hugging Face's layout, or blocks with offsets as in a checkpoint's model."""
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpml_compiler.runtime.weights.block_reader import read_blocks
from hpml_compiler.runtime.weights.safetensors_files import SafetensorsReader
from passes.errors import BadInput

LAYOUT = "give a folder of safetensors files, one such file, or a model.safetensors.index.json"


class WeightsSource:
    """Shapes, dtypes and places of the tensors below a path; headers are read at once, values when asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._described: dict[str, Any] = {}
        self._files: dict[MetadataIndex, tuple[str, str]] = {}
        for file, wanted in self._listed(Path(path)).items():
            self._add(file, wanted)

    def _listed(self, path: Path) -> Mapping[Path, set[str] | None]:
        """The files, each with the names to take from it; None for all."""
        if path.is_file() and path.suffix == ".safetensors":
            return {path: None}
        found = [path] if path.is_file() else sorted(path.glob("*.safetensors.index.json"))
        if len(found) > 1:
            raise BadInput(f"the folder has {len(found)} indices", self.path, "give the path of one of them")
        if found:
            return self._indexed(found[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            what = "has no safetensors files" if path.is_dir() else "does not exist"
            raise BadInput(f"the folder of the weights {what}", self.path, LAYOUT)
        return dict.fromkeys(files)

    def _indexed(self, index: Path) -> Mapping[Path, set[str] | None]:
        try:
            names = json.loads(index.read_text())["weight_map"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput("the index cannot be read: it has no weight_map", str(index), LAYOUT) from error
        result: dict[Path, set[str] | None] = {}
        for name, file in names:
            path = index.parent / str(file)
            if path.parent != index.parent or not path.is_file():
                raise BadInput(f"the index names the file {str(file)!r:.80}, which is not beside it", str(index),
                               "copy or download all files of the model")
            wanted = result.setdefault(path, set())
            assert wanted is not None
            wanted.add(name)
        return result

    def _add(self, file: Path, wanted: set[str] | None) -> None:
        with file.open("rb") as stream:
            reader = SafetensorsReader(stream, str(file))
        offsets = json.loads(reader.metadata.get("DCP_SHARDING_INFO", "{}"))
        for name in wanted or ():
            if name not in reader.chunks:
                raise BadInput(f"the index says that a file has {name}, but it has not", str(file),
                               "copy or download the file again")
        for name, (dtype, shape) in reader.chunks.items():
            if wanted is not None and name not in wanted:
                continue
            at = torch.Size(offsets[name]["saved_offsets"] if name in offsets else [0] * len(shape))
            chunk = ChunkStorageMetadata(at, torch.Size(shape))
            reach = [start + size for start, size in zip(at, shape, strict=True)]
            found = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(reach), [])
            known = self._described.setdefault(name, found)
            if MetadataIndex(name, at) in self._files:
                raise BadInput(f"two files have the tensor {name}", str(file), "remove one, or give an index")
            known.size = torch.Size(map(max, known.size, reach)) if reach else known.size
            known.chunks.append(chunk)
            self._files[MetadataIndex(name, at)] = str(file), name

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: each.size for name, each in self._described.items()}

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, or this rank's parts of them, by name; reads no other rows. Converts dtypes."""
        read_blocks(targets, Metadata(self._described), self._files, _opened)


def _opened(path: str) -> Any:
    return Path(path).open("rb")  # closed by the reader

"""Folders of safetensors files as Hugging Face has them: one file, or several with an index."""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from hpml_compiler.runtime.weights.safetensors_files import Chunk, encoded_header, file_order, nbytes, write_tensor
from passes.errors import BadInput

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_BYTES = 5 * 10**9
"""Size of a file, as in `save_pretrained`."""


class WeightsFolder:
    """Writes one whole model, a tensor at a time.

    chunks: dtype and shape of each tensor, by name, in the model's order. file_bytes: size at which a further file is begun.
    """

    def __init__(self, folder: Path, chunks: Mapping[str, Chunk], file_bytes: int = MOST_BYTES) -> None:
        self.folder, self._chunks = folder, chunks
        self._files: list[list[str]] = [[]]
        size = 0
        for name, chunk in chunks.items():
            if self._files[-1] and size + nbytes(*chunk) > file_bytes:
                self._files.append([])
                size = 0
            self._files[-1].append(name)
            size += nbytes(*chunk)

    def write(self, value_of: Callable[[str], torch.Tensor | None], writes: bool = True) -> None:
        """Write all files. value_of: a tensor by name, called once for each, in the same order on all ranks. writes: False on
        ranks that only take part in gathering."""
        if writes:
            self.folder.mkdir(parents=True, exist_ok=True)
        names = {}
        for number, members in enumerate(self._files):
            part = {name: self._chunks[name] for name in members}
            path = self.folder / self._name(number)
            names.update(dict.fromkeys(members, path.name))
            order = file_order(part)
            if not writes:
                for name in order:
                    value_of(name)
                continue
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            with partial.open("wb") as stream:
                self._write_file(stream, {name: part[name] for name in order}, value_of)
            partial.replace(path)
        if writes and len(self._files) > 1:
            total = sum(nbytes(*chunk) for chunk in self._chunks.values())
            (self.folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2))

    def _write_file(self, stream: BinaryIO, chunks: Mapping[str, Chunk],
                    value_of: Callable[[str], torch.Tensor | None]) -> None:
        stream.write(encoded_header(chunks, {"format": "pt"}))
        for name, (dtype, shape) in chunks.items():
            value = value_of(name)
            if value is None or value.dtype != dtype or tuple(value.shape) != tuple(shape):
                raise BadInput("the tensors of the model changed while it was saved", name, "save it between two steps")
            write_tensor(stream, value)

    def _name(self, number: int) -> str:
        if len(self._files) == 1:
            return FILE
        return f"model-{number + 1:05}-of-{len(self._files):05}.safetensors"

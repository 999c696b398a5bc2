"""Safetensors files: written as a stream, read by slices.

A file is eight bytes with the length of a header, the header (JSON: name -> dtype, shape, offsets), and the tensors' bytes.
The safetensors library maps whole files into memory, which counts against `ulimit -v`, and only local ones; training under a
memory limit, and on any file system of fsspec, needs reads of single slices.
"""
from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch

from passes.errors import BadInput, shortened

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER_BYTES = 100_000_000
"""The format's limit."""
PIECE_BYTES = 1 << 24
Chunk = tuple[torch.dtype, Sequence[int]]


def encoded_header(chunks: Mapping[str, Chunk], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file of these tensors, in order of the mapping. Raises BadInput for a dtype without a name."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in chunks.items():
        if dtype not in NAMES:
            raise BadInput(f"safetensors files have no tensors of {dtype}", f"tensor {name}", "save it as another dtype")
        end = at + nbytes(dtype, shape)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def file_order(chunks: Mapping[str, Chunk]) -> list[str]:
    """Names of the tensors, those of wide dtypes first, so that all are aligned."""
    return sorted(chunks, key=lambda name: (-chunks[name][0].itemsize, name))


def write_safetensors(stream: Any, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file of these tensors of host memory. stream: has `write(bytes)`."""
    chunks: dict[str, Chunk] = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    order = file_order(chunks)
    stream.write(encoded_header({name: chunks[name] for name in order}, metadata))
    for name in order:
        write_tensor(stream, tensors[name])


def write_tensor(stream: Any, tensor: torch.Tensor) -> None:
    """Write a tensor's bytes, in pieces."""
    raw: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    data = memoryview(raw)
    for start in range(0, len(data), PIECE_BYTES):
        stream.write(data[start:start + PIECE_BYTES])


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


class SafetensorsReader:
    """The tensors of one open file. name: of the file, for errors. Raises BadInput if it is no safetensors file."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= MOST_HEADER_BYTES:
            raise self._broken("it does not begin with the length of a header")
        try:
            header = json.loads(stream.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.chunks: dict[str, Chunk] = {key: (DTYPES[each["dtype"]], tuple(each["shape"])) for key, each in header.items()}
            self._offsets = {key: each["data_offsets"] for key, each in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._broken(f"its header cannot be read ({type(error).__name__}: {shortened(str(error))})") from error
        for key, (start_byte, end) in self._offsets.items():
            if end - start_byte != nbytes(*self.chunks[key]):
                raise self._broken(f"tensor {key} has {end - start_byte} bytes, which its shape and dtype do not")
        self._begin = 8 + length

    def _broken(self, why: str) -> BadInput:
        return BadInput(f"{self._name} is not a safetensors file: {why}", self._name, "copy or download the file again")

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """A block of a tensor, by default all of it. Rows outside of the block are not read."""
        dtype, shape = self.chunks[key]
        offsets = [0] * len(shape) if offsets is None else offsets
        sizes = [size - start for size, start in zip(shape, offsets)] if sizes is None else sizes
        row = nbytes(dtype, shape[1:])
        first, rows = (offsets[0], sizes[0]) if shape else (0, 1)
        data = bytearray(row * rows)
        self._stream.seek(self._begin + self._offsets[key][0] + first * row)
        self._fill(memoryview(data))
        whole_rows = (rows, *shape[1:]) if shape else ()
        result = torch.frombuffer(data, dtype=dtype).view(whole_rows) if data else torch.empty(whole_rows, dtype=dtype)
        for dim in range(1, len(shape)):
            result = result.narrow(dim, offsets[dim], sizes[dim])
        return result

    def _fill(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            piece = self._stream.read(min(PIECE_BYTES, len(data) - at))
            if not piece:
                raise self._broken("it ends too early")
            data[at:at + len(piece)] = piece
            at += len(piece)

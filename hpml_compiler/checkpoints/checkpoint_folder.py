"""The folder of a run's checkpoints, on any file system of fsspec.

`step-00000100` is the checkpoint after 100 steps. On a local file system it is written under another name, `.writing-...`, and
renamed when it is complete; elsewhere a rename is no single action, and the manifest, which is written last, makes it complete.
A checkpoint is renamed to `.removing-...` before its files are deleted, so none is ever there in part.
"""
from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from passes.errors import BadInput

STEP = re.compile(r"step-(\d{8,})")
WRITING, REMOVING = ".writing-", ".removing-"
PIECE_BYTES = 1 << 24


class CheckpointFolder:
    """root: path of the folder on its file system."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.given = os.fspath(folder)
        try:
            self._fs, self.root = fsspec.core.url_to_fs(self.given)
        except (ValueError, ImportError) as error:
            raise BadInput(f"the folder of the checkpoints cannot be opened: {error}", self.given,
                           "give a path, or a URL whose file system fsspec has (pip install s3fs, gcsfs, adlfs)") from error
        self.local = isinstance(self._fs, LocalFileSystem)

    def path(self, *names: str) -> str:
        return "/".join([self.root.rstrip("/"), *names])

    def create(self) -> None:
        """Create the folder if it does not exist. Raises BadInput if it cannot be written to."""
        probe = self.path(f".probe-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            self._fs.makedirs(self.root, exist_ok=True)
            with self._fs.open(probe, "wb") as stream:
                stream.write(b"hpml")
            self._fs.rm_file(probe)
        except OSError as error:
            raise BadInput(f"checkpoints cannot be written: {error.strerror or error}", self.given,
                           "give a folder that this user may write to, with free space") from error

    def steps(self) -> list[int]:
        """Steps of the checkpoints in the folder, ascending; also of damaged ones."""
        if not self._fs.exists(self.root):
            return []
        if not self._fs.isdir(self.root):
            raise BadInput("the folder of the checkpoints is a file", self.given, "give a folder")
        found = (STEP.fullmatch(name) for name in self._names(self.root))
        return sorted(int(match[1]) for match in found if match)

    def _names(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        return [each.rstrip("/").rsplit("/", 1)[-1] for each in self._fs.ls(path, detail=False)]

    def files(self, checkpoint: str) -> dict[str, int]:
        """Sizes of all files of a checkpoint by path below it, in order of names."""
        self._fs.invalidate_cache()
        top = self.path(checkpoint)
        found = self._fs.find(top, detail=True)
        skipped = len(self._fs._strip_protocol(top).rstrip("/")) + 1
        return {path[skipped:]: details["size"] for path, details in sorted(found.items())}

    def writing_name(self, step: int, token: str) -> str:
        """Folder in which a checkpoint is written."""
        return f"{WRITING}{name_of(step)}-{token}" if self.local else name_of(step)

    def make(self, checkpoint: str, *below: str) -> None:
        self._fs.makedirs(self.path(checkpoint, *below), exist_ok=True)

    @contextlib.contextmanager
    def write(self, *path: str) -> Iterator[HashingStream]:
        """Open a new file. It is on the disk when the context ends."""
        with self._fs.open(self.path(*path), "wb") as stream:
            yield HashingStream(stream)
            if self.local:
                stream.flush()
                os.fsync(stream.fileno())

    def read(self, *path: str) -> Any:
        """Open a file for reading bytes."""
        return self._fs.open(self.path(*path), "rb")

    def digest(self, *path: str) -> str:
        """Hash of a file's bytes."""
        hashed = new_hash()
        with self.read(*path) as stream:
            while piece := stream.read(PIECE_BYTES):
                hashed.update(piece)
        return hashed.hexdigest()

    def complete(self, written: str, step: int) -> None:
        """Give a written checkpoint its name, in place of an earlier one of the same step."""
        if not self.local:
            return
        self._sync_tree(self.path(written))
        final = self.path(name_of(step))
        if os.path.lexists(final):
            self.remove(name_of(step))
        os.rename(self.path(written), final)
        _sync(self.root)

    def remove(self, checkpoint: str) -> None:
        """Delete a checkpoint, first its name."""
        if self.local and not checkpoint.startswith((WRITING, REMOVING)):
            moved = f"{REMOVING}{checkpoint}-{os.urandom(4).hex()}"
            os.rename(self.path(checkpoint), self.path(moved))
            checkpoint = moved
        elif not self.local:  # without its manifest it is not complete
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self.path(checkpoint, "manifest.json"))
        self._fs.rm(self.path(checkpoint), recursive=True)

    def remove_unfinished(self) -> None:
        """Delete what a run that was killed left behind."""
        if self.local and os.path.isdir(self.root):
            for name in self._names(self.root):
                if name.startswith((WRITING, REMOVING)):
                    self._fs.rm(self.path(name), recursive=True)

    def _sync_tree(self, top: str) -> None:
        for folder, _, _ in os.walk(top):
            _sync(folder)


class HashingStream:
    """Writes to a stream and hashes the bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._hash, self.nbytes = stream, new_hash(), 0

    def write(self, data: Any) -> None:
        self._stream.write(data)
        self._hash.update(data)
        self.nbytes += len(data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def new_hash() -> Any:
    return blake2b(digest_size=32)


def name_of(step: int) -> str:
    """Name of the checkpoint after this number of steps."""
    return f"step-{step:08}"


def _sync(folder: str) -> None:
    """Make the names in a folder durable."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

"""Picture files: supported formats, and matplotlib figures written atomically."""
from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from passes.errors import BadInput
from passes.filesystem.text_files import check_writable, is_device, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "pdf")


def picture_format(path: str | os.PathLike[str], what: str) -> str:
    """Picture format by the file's suffix; svg for a device such as /dev/stdout. Raises BadInput for another suffix."""
    suffix = Path(path).suffix.lower().lstrip(".")
    if not suffix and is_device(path):
        return FORMATS[0]
    if suffix not in FORMATS:
        kind = f"a file of type .{suffix}" if suffix else "a file without an ending"
        endings = ", ".join(f".{each}" for each in FORMATS)
        raise BadInput(f"cannot draw {what} into {kind}", str(path), f"name a file that ends in one of {endings}")
    return suffix


def check_picture(path: str | os.PathLike[str] | None, what: str) -> None:
    """Check that a picture can be written to `path`, before slow work starts; None: no picture. Raises BadInput."""
    check_writable(path, what)
    if path is not None:
        picture_format(path, what)


def save_figure(figure: Figure, path: str | os.PathLike[str], what: str, dpi: int) -> None:
    """Write a matplotlib figure. Raises BadInput."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format=picture_format(path, what))
    write_file(path, drawn.getvalue(), what)

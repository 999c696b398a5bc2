"""Pictures as files: which formats there are, and matplotlib's figures written whole or not at all."""
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
    """The format that the file's name asks for; of a device such as /dev/stdout, whose name says nothing, svg. Raises
    BadInput for another ending."""
    suffix = Path(path).suffix.lower().lstrip(".")
    if not suffix and is_device(path):
        return FORMATS[0]
    if suffix not in FORMATS:
        kind = f"a file of type .{suffix}" if suffix else "a file without an ending"
        endings = ", ".join(f".{each}" for each in FORMATS)
        raise BadInput(f"cannot draw {what} into {kind}", str(path), f"name a file that ends in one of {endings}")
    return suffix


def check_picture(path: str | os.PathLike[str] | None, what: str) -> None:
    """Raises BadInput where no picture can be written: asked before something slow is done. None is no picture."""
    check_writable(path, what)
    if path is not None:
        picture_format(path, what)


def save_figure(figure: Figure, path: str | os.PathLike[str], what: str, dpi: int) -> None:
    """Write a figure of matplotlib. Raises BadInput."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format=picture_format(path, what))
    write_file(path, drawn.getvalue(), what)

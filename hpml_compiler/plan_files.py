"""Files of plans: strict JSON of one format version, written whole or not at all."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from passes.errors import BadInput

FORMAT_VERSION = 1


def json_content(text: str, where: str, next_step: str) -> dict[str, Any]:
    """The object in `text`, with the format version that this hpml reads. Raises BadInput."""
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise BadInput(what=f"not a plan: {error}", where=where, next_step=next_step) from error
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        version = content.get("format_version") if isinstance(content, dict) else None
        raise BadInput(what=f"this hpml reads plans of format_version {FORMAT_VERSION}, this one has {version!r}",
                       where=where, next_step=next_step)
    return content


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a plan; an older file at `path` stays whole until the new one is. Raises BadInput."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BadInput(what=f"cannot write the plan: {error.strerror}", where=str(path),
                       next_step="name a file in a folder that exists and can be written") from error


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a plan's file. Raises BadInput."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(what=f"cannot read the plan: {error}", where=str(path),
                       next_step="give a file that `hpml plan TARGET --save PLAN.json` wrote") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

"""Files of plans: strict JSON of one format version, written whole or not at all."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from typing_extensions import Self

from hpml_compiler.plan_records import Record
from passes.errors import BadInput

FORMAT_VERSION = 1


class PlanFile(Record):
    """A record with files of its own; who inherits it says in `from_json` what a file has to be."""

    def to_json(self) -> str:
        """The whole plan as strict JSON text."""
        return json.dumps(self.model_dump(mode="json"), allow_nan=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Self:
        """The plan in `text`; `where` names it in errors. Raises BadInput for anything but a whole, valid plan."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan; an older file at `path` stays whole until the new one is."""
        write_text(self.to_json(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. Raises BadInput."""
        return cls.from_json(read_text(path), where=str(path))


def is_mixed(text: str) -> bool:
    """Whether this looks like the file of a mixed plan."""
    try:
        content = json.loads(text)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("kind") == "mixed"


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

"""Plan files: strict JSON of one format version, written atomically."""
from __future__ import annotations

import json
import os
from typing import Any

from typing_extensions import Self

from hpml_compiler.plans.record_fields import Hardware, Record
from passes.errors import BadInput
from passes.filesystem.text_files import read_text, write_file
from passes.hardware.cluster import Cluster
from passes.json_records import parse_json

FORMAT_VERSION = 7


class PlanFile(Record):
    """Base of records that are saved to a JSON file; subclasses validate the file's contents in `from_json`.

    cluster: name for people. hardware: devices and links that the plan was made for, under its power cap; plans that are
    written by hand, or by earlier releases, have none.
    """

    cluster: str | None
    hardware: Hardware | None = None

    @property
    def known_cluster(self) -> Cluster | None:
        """The cluster that prices the plan: its own hardware, else what its name is here. None if it names a device file that
        is missing or a local machine."""
        try:
            return self.hardware or (Cluster.parse(self.cluster) if self.cluster else None)
        except BadInput:
            return None

    def to_json(self) -> str:
        """The plan as strict JSON text."""
        return json.dumps(self.model_dump(mode="json"), allow_nan=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Self:
        """Parse the plan in `text`; `where` names it in errors. Raises BadInput unless it is a complete, valid plan."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` atomically: an older file stays intact until the new one is complete."""
        write_file(path, self.to_json(), "the plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote. Raises BadInput."""
        return cls.from_json(read_plan(path), where=str(path))


def is_mixed(text: str) -> bool:
    """True if the text looks like the file of a mixed plan: a JSON object of kind "mixed"."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == "mixed"


def json_content(text: str, where: str, next_step: str) -> dict[str, Any]:
    """Parse the object in `text` and check its format version. Raises BadInput."""
    content = parse_json(text, where, next_step, "not a plan")
    if not isinstance(content, dict) or "format_version" not in content:
        raise BadInput(what="this JSON file is not a plan: it has no format_version", where=where, next_step=next_step)
    version = content["format_version"]
    if version != FORMAT_VERSION:
        raise BadInput(what=f"this hpml reads plans of format_version {FORMAT_VERSION}, this one has {version!r}",
                       where=where, next_step=next_step)
    return content


def read_plan(path: str | os.PathLike[str]) -> str:
    """Read the text of a plan file. Raises BadInput."""
    return read_text(path, "the plan", "give a file that `hpml plan TARGET --save PLAN.json` wrote")

"""Run notebooks, and say what in their outputs has to be the same wherever they are run.

`python -m tests.notebooks.outputs [NAME ...]` runs them and writes the outputs into the files, as they are committed.
"""
from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
CELL_TIMEOUT_S = 150
VARIES = "varies"
"""Tag of cells whose outputs depend on the machine, such as plans for the devices that are there: only that there is
such an output is compared."""

_UNITS = "ns|us|µs|ms|s|uJ|mJ|J|kJ|MJ|W"
_NORMAL = (
    (re.compile(rf"\d[\d.,]*(?:e[-+]?\d+)? ?(?:{_UNITS})\b"), "<n>"),
    (re.compile(r"torch \d+\.\d+[\w.+]*"), "torch <version>"),
    (re.compile(r"0x[0-9a-f]+"), "<address>"),
    (re.compile(r"\d\.\d{5,}"), "<digits>"),
    (re.compile(r"\d(?:\.\d)?e[-+]\d+"), "<small>"),
    (re.compile(r"─+"), "─"),
    (re.compile(r"\s+"), " "),
)


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in `folder`. Raises CellExecutionError for the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3",
                            resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"})
    return notebook


def comparable(cell: nbformat.NotebookNode) -> list[Any]:
    """What a cell put out, without what differs from run to run: kinds of outputs, and text with times left out."""
    found: list[Any] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            if output.name != "stdout":  # warnings of libraries
                continue
            text = output.text
            if found and found[-1][0] == "text":
                text = found.pop()[1] + text
            found.append(("text", text))
        else:
            data = output.get("data", {})
            found.append((output.output_type, sorted(data)))
            if "text/plain" in data and len(data) == 1:
                found.append(("result", data["text/plain"]))
    if VARIES in cell.metadata.get("tags", []):
        return [kind for kind, _ in found]
    return [(kind, _normal(value) if isinstance(value, str) else value) for kind, value in found]


def _normal(text: str) -> str:
    for pattern, instead in _NORMAL:
        text = pattern.sub(instead, text)
    return text.strip()


def _clean(notebook: nbformat.NotebookNode) -> None:
    """Leaves out what says only when and where it ran."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                notebook = execute(path, Path(folder))
            _clean(notebook)
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])

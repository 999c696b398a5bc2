"""The notebooks run from top to bottom, and lie in the repository without outputs."""
from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
EXPECTED = ["01_trace_and_annotate", "02_partition_with_an_ilp", "03_compile_and_run", "04_a_cluster_one_does_not_have"]
CELL_TIMEOUT_S = 150


def test_all_notebooks_are_there():
    assert [path.stem for path in NOTEBOOKS] == EXPECTED


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_kept(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    left = [cell.id for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]
    assert not left, f"clear the outputs: jupyter nbconvert --clear-output --inplace {path.name}"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises CellExecutionError, with the traceback, for the first cell that fails
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert "Traceback" not in printed

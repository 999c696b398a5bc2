"""Measured step times for calibration: read and validate the rows of a JSON file.

The file contains an array of rows, or an object with `rows` and their `source`. A row:

    {"name": "1.7B", "target": "models.py:gpt_1_7b", "cluster": "4x8:a100-80g", "mesh": {"dp": 32}, "options": {},
     "seconds": 3.53, "recompute": "full", "microbatches": 1}

or, in place of `seconds`, `tflops_per_device` with the `formula` that defines it and the formula's `arguments`.
A row with `"held_out": true` is predicted and compared, but not fitted to. The model is planned as if it returned only its
loss, since trainers do not gather logits; `"outputs": "all"` counts every output that it returns, as hpml would.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from hpml_compiler.plans.record_fields import Mesh, Record
from hpml_compiler.plans.validation_errors import describe_errors
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.json_records import read_json

EXAMPLE = ('a row is {"target": "models.py:gpt", "cluster": "4x8:a100-80g", "mesh": {"dp": 32}, "seconds": 3.5}; '
           "docs/calibration.md lists all keys")

Positive = Annotated[int, Field(ge=1)]


class MegatronArguments(Record):
    """Arguments of `megatron_flops`; `batch` is the global batch in sequences."""

    layers: Positive
    hidden: Positive
    vocabulary: Positive
    sequence: Positive
    batch: Positive


class RowPipeline(Record):
    """Pipeline of a measured run: stages, schedule, and `virtual` stages per device, interleaved."""

    stages: Positive
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    virtual: Positive = 1


class MeasuredRow(Record):
    """One measured step; see the module's docstring. `mesh` is pinned; with a pipeline it is the mesh of one stage."""

    name: str = ""
    target: str
    cluster: str
    mesh: Mesh
    options: dict[str, JsonValue] = Field(default_factory=dict)
    seconds: Annotated[float, Field(gt=0)] | None = None
    tflops_per_device: Annotated[float, Field(gt=0)] | None = None
    formula: Literal["megatron"] | None = None
    arguments: MegatronArguments | None = None
    recompute: Literal["none", "full"] = "none"
    microbatches: Positive = 1
    pipeline: RowPipeline | None = None
    held_out: bool = False
    outputs: Literal["all", "loss"] = "loss"
    source: str = ""

    @model_validator(mode="after")
    def _one_measurement(self) -> MeasuredRow:
        if (self.seconds is None) == (self.tflops_per_device is None):
            raise ValueError("give either seconds or tflops_per_device")
        if (self.tflops_per_device is None) != (self.formula is None) or (self.formula is None) != (self.arguments is None):
            raise ValueError("tflops_per_device goes with a formula and its arguments, seconds without")
        return self

    @property
    def devices(self) -> int:
        """Number of devices of the cluster. Raises BadInput for a cluster that cannot be parsed."""
        return Cluster.parse(self.cluster).world_size

    @property
    def planned(self) -> dict[str, Any]:
        """Options for planning the row."""
        if self.pipeline is None:
            return {**self.options, "mesh": dict(self.mesh)}
        pipe = self.pipeline
        return {**self.options, "mesh": {"pp": pipe.stages, **self.mesh}, "microbatches": self.microbatches,
                "schedule": pipe.schedule, "virtual_stages": pipe.virtual}

    @property
    def measured_s(self) -> float:
        """Measured seconds per step."""
        if self.seconds is not None:
            return self.seconds
        assert self.tflops_per_device is not None
        return self._flops / (self.tflops_per_device * 1e12 * self.devices)

    def tflops(self, seconds: float) -> float | None:
        """Convert seconds per step to TFLOP/s per device by the row's formula; None for a row in seconds."""
        return None if self.arguments is None else self._flops / seconds / self.devices * 1e-12

    @property
    def _flops(self) -> float:
        assert self.arguments is not None
        return megatron_flops(**self.arguments.model_dump())


def megatron_flops(layers: int, hidden: int, vocabulary: int, sequence: int, batch: int) -> float:
    """FLOPs of a GPT training step with full recomputation: 96 B s l h² (1 + s/(6h) + V/(16 l h)), matmuls only.

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC'21
    (arXiv 2104.04473), equation 3. Divided by step time and number of devices it is that paper's TFLOP/s per GPU.
    """
    return (96.0 * batch * sequence * layers * hidden**2
            * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)))


def read_rows(path: Path) -> tuple[MeasuredRow, ...]:
    """Read the rows of a file. A target's file is looked up in the working directory, then in the folder of `path`.

    Raises BadInput with the file, the row and the key.
    """
    data = read_json(path)
    listed = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(listed, list) or not listed:
        raise BadInput("there are no rows: neither an array nor an object with `rows`", str(path), EXAMPLE)
    if isinstance(data, dict) and (unknown := sorted(set(data) - {"rows", "source", "notes"})):
        raise BadInput(f"unknown key {unknown[0]!r}", str(path), "legal keys beside rows: source, notes")
    return tuple(_row(entry, number, path) for number, entry in enumerate(listed))


def _row(entry: Any, number: int, path: Path) -> MeasuredRow:
    where = f"{path}, row {number}"
    if isinstance(entry, dict) and isinstance(entry.get("name"), str) and entry["name"]:
        where += f" ({entry['name']})"
    try:
        row = MeasuredRow.model_validate_json(json.dumps(entry))
        named = row if row.name else row.model_copy(update={"name": f"row {number}"})
        devices = row.devices
    except ValidationError as error:
        raise BadInput(f"not a row: {describe_errors(error)}", where, EXAMPLE) from error
    except BadInput as error:
        raise BadInput(error.what, f"{where}: {error.where}", error.next_step) from error
    size = row.pipeline.stages if row.pipeline else 1
    for length in row.mesh.values():
        size *= length
    if size != devices:
        stages = f" times {row.pipeline.stages} stages" if row.pipeline else ""
        raise BadInput(f"the mesh {row.mesh}{stages} has {size} devices, the cluster {row.cluster} has {devices}", where,
                       "pin all axes of the mesh, with sizes that multiply to the cluster")
    file, colon, function = row.target.rpartition(":")
    beside = path.parent / file
    if colon and file.endswith(".py") and not Path(file).is_file() and beside.is_file():
        named = named.model_copy(update={"target": f"{beside}:{function}"})
    return named

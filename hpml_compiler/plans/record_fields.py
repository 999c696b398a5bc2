"""Base class and field types of a plan's records."""
from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, StringConstraints

from passes.hardware.cluster import Cluster
from passes.json_records import from_json, to_json


def _cluster(value: Any) -> Cluster:
    return value if isinstance(value, Cluster) else from_json(Cluster, value, "hardware")



Placement = Annotated[str, StringConstraints(pattern=r"^(R|P|M|S\(\d+(\.\d+)?\))$")]
# strict=False lets a JSON list become the tuple that a frozen model needs; items stay strict
Placements = Annotated[tuple[Placement, ...], Field(strict=False)]
PlacementsOfEach = Annotated[tuple[Placements, ...], Field(strict=False)]
Shape = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
# solvers number their classes, JSON's keys are strings
ClassId = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]
Count = Annotated[int, Field(ge=0)]
Microseconds = Annotated[float, Field(ge=0.0)]
Mesh = dict[str, Annotated[int, Field(ge=1)]]
Hardware = Annotated[Cluster, PlainValidator(_cluster), PlainSerializer(to_json)]


class Record(BaseModel):
    """Base of all records of a plan: immutable, every field validated, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

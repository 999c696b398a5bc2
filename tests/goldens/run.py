"""Run one case in a rank, and leave its record in a file."""
from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.goldens.cases import Case
from tests.goldens.recorder import Recorder, recording
from tests.scripts.compare import Outcome, refusal_of, seen_within_least
from tests.scripts.snapshot import digest
from tests.scripts.use import Script


@dataclass
class Golden(Script):
    """A script that is compiled by a case's options, also on one rank."""

    given: dict[str, Any] = field(default_factory=dict)

    def compile(self, model: Any, **options: Any) -> Any:
        budget = {"memory_budget": self.budget_bytes} if self.budget_bytes else {}
        return torch.compile(model, backend="hpml", options={"compiler": "eager", **self.given, **budget, **options})


def recorded(name: str, place: str, rank: int, folder: Path) -> Outcome:
    case, start = Case(name, place), time.perf_counter()
    script = Golden(place, folder / "split", rank, given=case.options)
    recorder = Recorder()
    try:
        with recording() as recorder:
            leaves = seen_within_least(case.use(), script)
        recorder.plan_of()
        outcome = Outcome("same", digest=digest(leaves))
    except Exception as error:
        words = refusal_of(error)
        outcome = Outcome("refused" if words else "raised", words or "".join(traceback.format_exception(error))[-300:])
    (folder / f"{rank}.record").write_text(json.dumps(recorder.record))
    return replace(outcome, seconds=time.perf_counter() - start)

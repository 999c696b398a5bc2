"""Judge one combination of options in a rank."""
from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import hpml_compiler
from tests.combinations.space import options_of, train
from tests.scripts.compare import Outcome, refusal_of, seen, seen_within_least
from tests.scripts.snapshot import difference
from tests.scripts.use import Script, Use

TOLERANCE = 1e-9


@dataclass
class Compiled(Script):
    """A script that is compiled by these options, also on one rank."""

    given: dict[str, Any] = field(default_factory=dict)

    def compile(self, model: Any, **options: Any) -> Any:
        budget = {"memory_budget": self.budget_bytes} if self.budget_bytes else {}
        return torch.compile(model, backend="hpml", options={**self.given, **budget, **options})


def judged(text: str, rank: int, folder: Path) -> Outcome:
    chosen, start = json.loads(text), time.perf_counter()
    use = Use("combination", lambda script: train(script, chosen), tolerance=TOLERANCE)
    expected = seen(use, Script(None, folder / f"one{rank}", rank))
    options, launches = options_of(chosen), chosen["launches"]
    os.environ["HPML_CACHE"] = "1" if launches == 2 else "0"
    try:
        found = seen_within_least(use, Compiled("split", folder / "split", rank, given=options))
        if launches != 1:
            if launches == "plan":
                options = {**options, "plan": hpml_compiler.last_plan()}
            found = seen_within_least(use, Compiled("split", folder / "split", rank, given=options))
    except Exception as error:
        words = refusal_of(error)
        return Outcome("refused" if words else "crashed", words or "".join(traceback.format_exception(error))[-1500:],
                       time.perf_counter() - start)
    words = difference(found, expected, TOLERANCE)
    return Outcome("different" if words else "same", words or "", time.perf_counter() - start)

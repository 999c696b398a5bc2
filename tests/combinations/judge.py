"""Judge one combination of options in a rank."""
from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpml_compiler
from hpml_compiler.units import parse_bytes
from tests.combinations.space import Training, options_of, train
from tests.helpers.peaks import least_peak
from tests.scripts.compare import Outcome, refusal_of, seen, seen_within_least
from tests.scripts.snapshot import difference, snapshot
from tests.scripts.use import Script, Use

TOLERANCE = 1e-9


@dataclass
class Compiled(Script):
    """A script that is compiled by these options, also on one rank. memory: bytes of its step, on the fullest rank, if they are
    asked for: its "peak", the "predicted" one, and the "budget" if there is one."""

    given: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, float] | None = None

    def compile(self, model: Any, **options: Any) -> Any:
        return torch.compile(model, backend="hpml", options={**self.given, **self._budget(), **options})

    def _budget(self) -> dict[str, int]:
        return {"memory_budget": self.budget_bytes} if self.budget_bytes else {}

    def measure(self, training: Training) -> None:
        if self.memory is None:
            return
        with torch.random.fork_rng():  # where a script leaves the generator is compared
            peak = least_peak(training.step, training.whole, training.optimizer)
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        self.memory.update(peak=max(peaks), predicted=hpml_compiler.last_plan().memory.peak)
        budget = {**self.given, **self._budget()}.get("memory_budget")
        if budget is not None:
            self.memory["budget"] = parse_bytes(budget)


def run(script: Script, chosen: dict[str, Any]) -> dict[str, Any]:
    training = Training(script, chosen)
    losses = train(training, chosen)
    found = dict(snapshot((losses, training.whole, training.optimizer)))
    if isinstance(script, Compiled):
        script.measure(training)
    return found


def judged(text: str, peaks: bool, rank: int, folder: Path) -> Outcome:
    """peaks: measure memory, too."""
    chosen, start = json.loads(text), time.perf_counter()
    use = Use("combination", lambda script: run(script, chosen), tolerance=TOLERANCE)
    expected = seen(use, Script(None, folder / f"one{rank}", rank))
    script = Compiled("split", folder / "split", rank, given=options_of(chosen))
    launches, memory = chosen["launches"], {} if peaks else None
    os.environ["HPML_CACHE"] = "1" if launches == 2 else "0"
    try:
        if launches != 1:
            seen_within_least(use, script)
        if launches == "plan":
            script = replace(script, given={**script.given, "plan": hpml_compiler.last_plan()})
        found = seen_within_least(use, replace(script, memory=memory))
    except Exception as error:
        words = refusal_of(error)
        return Outcome("refused" if words else "crashed", words or "".join(traceback.format_exception(error))[-1500:],
                       time.perf_counter() - start)
    words = difference(found, expected, TOLERANCE)
    return Outcome("different" if words else "same", words or "", time.perf_counter() - start, memory=memory or {})

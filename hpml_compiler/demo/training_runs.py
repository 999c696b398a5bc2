"""Run the training script on a number of ranks, parse the losses that it prints, and compare two runs."""
from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from passes.errors import HpmlError

SCRIPT = Path(__file__).with_name("train.py")
# Ranks write to one pipe, and a text may arrive without its newline: a line may contain the texts of several ranks.
_STEP = re.compile(r"step (\d+) loss (\d+\.\d{8}|nan|inf)")
_PARAMETERS = re.compile(r"parameters (\d+)")
_LINES_KEPT = 30  # last lines of a script's output that an error shows


@dataclass(frozen=True)
class TrainingRun:
    """One training run. losses: a row per step, with each rank's loss. first_step_s: from the start of the processes to the
    first loss, including compilation. step_s: median time of the later steps. threads: per rank."""

    ranks: int
    parameters: int
    losses: tuple[tuple[float, ...], ...]
    first_step_s: float
    step_s: float
    threads: int = 1

    @property
    def curve(self) -> tuple[float, ...]:
        """The loss of every step, as printed by one of the ranks."""
        return tuple(row[0] for row in self.losses)


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Command line of a run: `python train.py` for one rank, `hpml run --nproc N train.py` for more."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "hpml_compiler.cli", "run", "--nproc", str(ranks)]
    return [*start, str(SCRIPT), *arguments]


def run_training(ranks: int, arguments: Sequence[str], environment: Mapping[str, str],
                 on_step: Callable[[int, float], None]) -> TrainingRun:
    """Run the script to its end, calling `on_step(step, loss)` when the first rank prints a step.

    Ranks run on the CPU, with one thread each unless `environment` sets OMP_NUM_THREADS. Raises HpmlError with the last
    lines of output if the script fails.
    """
    one_thread_each = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    threads = int(environment.get("OMP_NUM_THREADS", "1"))
    began = time.perf_counter()
    arrivals: list[float] = []
    losses: dict[int, list[float]] = {}
    parameters = 0
    last_lines: deque[str] = deque(maxlen=_LINES_KEPT)
    process = subprocess.Popen(
        command(ranks, arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env={**os.environ, **one_thread_each, **environment},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            last_lines.append(line)
            if found := _PARAMETERS.search(line):
                parameters = int(found[1])
            for text, value in _STEP.findall(line):
                step, loss = int(text), float(value)
                if step not in losses:
                    losses[step] = []
                    arrivals.append(time.perf_counter() - began)
                    on_step(step, loss)
                losses[step].append(loss)
        code = process.wait()
    finally:
        if process.poll() is None:  # after an error or Ctrl-C; torchrun terminates its ranks on SIGTERM
            process.terminate()
            process.wait()
    if code or not losses:
        raise HpmlError(f"the training script failed (exit code {code}); it ended with\n{''.join(last_lines).rstrip()}",
                        where=f"{ranks} rank{'s' * (ranks > 1)}", next_step=" ".join(command(ranks, arguments)))
    between = [later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False)]
    rows = tuple(tuple(losses[step]) for step in sorted(losses))
    return TrainingRun(ranks, parameters, rows, arrivals[0], statistics.median(between or [0.0]), threads)


def largest_difference(one: TrainingRun, many: TrainingRun) -> float:
    """Largest relative difference between the losses of `many` (any rank) and `one` at the same step; inf for NaN or inf.

    Raises HpmlError unless every rank of both runs printed every step.
    """
    for run in (one, many):
        counts = {len(row) for row in run.losses}
        if counts != {run.ranks} or len(run.losses) != len(one.losses):
            raise HpmlError(f"the run on {run.ranks} ranks printed {len(run.losses)} steps, each {sorted(counts)} times",
                            where=str(SCRIPT), next_step="look at what the script prints; every rank prints every step")
    pairs = zip(one.curve, many.losses, strict=True)
    differences = [abs(loss - reference) / abs(reference) for reference, row in pairs for loss in row]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)

"""Run a use on one device and split, in this rank, and judge."""
from __future__ import annotations

import random
import re
import shutil
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpml_compiler
from hpml_compiler.runtime.outputs.loss_memory import LossMemories
from hpml_compiler.runtime.outputs.output_wrapper import OutputUses
from hpml_compiler.session import session
from passes.errors import HpmlError
from passes.session_state import state_of
from tests.scripts.snapshot import Leaf, difference, digest, snapshot
from tests.scripts.use import Script, Use

VERDICTS = ("same", "refused", "different", "crashed")


@dataclass
class Outcome:
    """same: one device's result. refused: a clear word of hpml's. different: silently wrong. crashed: all else."""

    verdict: str
    detail: str = ""
    seconds: float = 0.0
    graphs: int = 0
    digest: str = ""
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes by name, if they are measured."""
    outputs: tuple[str, ...] = ()
    """Places where the script's work on outputs ran, of "in the step", "on shards" and "gathered"."""


class Unfit(Exception):
    """A script that does not run on one device: it says nothing about hpml."""


def in_short(detail: str) -> str:
    """One line of it: of a traceback, the last error's."""
    lines = [line for line in detail.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Failed|Exception|Unsupported)\b", line)]
    return (errors or lines or [""])[-1 if errors else 0][:160]


def judge(use: Use, mesh: str, folder: Path, rank: int, expected: list[Leaf] | None = None) -> Outcome:
    """expected: what one device sees, where that is known."""
    start = time.perf_counter()
    try:
        expected = expected or seen(use, Script(None, _empty(folder / f"one{rank}"), rank))
    except Exception as error:
        raise Unfit(f"{type(error).__name__} on one device: {error}") from error
    start_split, compiled_before = time.perf_counter(), _compiled()
    try:
        script = Script(mesh, folder / "split", rank)
        actual = seen_within_least(use, script)
    except Exception as error:
        words = refusal_of(error)
        detail = words or "".join(traceback.format_exception(error))
        return Outcome("refused" if words else "crashed", detail, time.perf_counter() - start)
    finally:
        graphs = len(hpml_compiler.last_plan().graphs) if session.current().graphs else 0
        if mesh == "stages":  # plans of stages are made when somebody asks, and not for all graphs
            graphs = _compiled() - compiled_before
        print(f"{use.name} on {mesh}: {start_split - start:.2f} s + {time.perf_counter() - start_split:.2f} s", flush=True)
    wrong = difference(actual, expected, use.tolerance)
    if wrong is None and bool(graphs) != use.compiles:
        wrong = f"{graphs} graphs came to the backend"
    return Outcome("different" if wrong else "same", wrong or "", time.perf_counter() - start, graphs, digest(actual),
                   outputs=tuple(script.places))


def _places_of_work() -> list[str]:
    uses = state_of(OutputUses).values()
    found = {"in the step": any(memory.losses for memory in state_of(LossMemories)),
             "on shards": any(use.on_shards for use in uses), "gathered": any(use.gathers for use in uses)}
    return [name for name, is_so in found.items() if is_so]


def seen_within_least(use: Use, script: Script) -> list[Leaf]:
    """What a use sees; under a budget that is too small, within the least that is said to do."""
    for _ in range(5):
        try:
            return seen(use, script)
        except Exception as error:
            least = max((getattr(each, "smallest_budget_bytes", None) or 0 for each in _chain(error)), default=0)
            if not 0 < least < float("inf"):
                raise
            script = replace(script, budget_bytes=max(int(1.02 * least), int(1.1 * script.budget_bytes)))
    return seen(use, script)


def _compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def seen(use: Use, script: Script) -> list[Leaf]:
    """What a use returns, and where it leaves the generator of random numbers."""
    torch._dynamo.reset()
    session.reset()
    torch.manual_seed(0)
    random.seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    if script.mesh is not None:
        if script.rank == 0:
            _empty(script.folder)
        dist.barrier()
    try:
        value = use.run(script)
        script.places[:] = _places_of_work()
        generator = torch.get_rng_state()  # before what gathering may draw
        return snapshot({"returned": value, **({"generator": generator} if use.generator else {})})
    finally:
        torch.set_default_dtype(before)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def refusal_of(error: BaseException | None) -> str | None:
    """What hpml says, if that is what ended the script."""
    first = next((each for each in _chain(error) if isinstance(each, HpmlError)), None)
    return str(first) if first is not None and first.where and first.next_step else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from; Dynamo wraps what a backend raises."""
    seen: set[int] = set()
    queue: list[Any] = [error]
    while queue:
        error = queue.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            yield error
            queue += [error.__cause__, error.__context__, getattr(error, "inner_exception", None)]

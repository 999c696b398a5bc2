"""Random scripts, on one device and split: `python -m tests.scripts.fuzz --cases 500` searches, and prints what it finds.

A script that is silently wrong ends the search on its mesh, shrunk to what shows it. Refusals and crashes are counted, and
the first script of each kind printed. `--of leaves` makes scripts in which several graphs read one leaf, `--script FILE` judges
one that was printed.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.scripts.compare import in_short
from tests.scripts.fuzz_leaf import leaves
from tests.scripts.fuzz_ranks import Ranks
from tests.scripts.fuzz_strategies import scripts
from tests.scripts.use import MESHES


class SilentlyWrong(AssertionError):
    """The message holds the script."""


KINDS = {"scripts": scripts(), "leaves": leaves()}


def search(ranks: Ranks, mesh: str, cases: int, start: int = 0, others: dict[str, str] | None = None,
           of: SearchStrategy[str] | None = None) -> Counter[str]:
    """Judge that many random scripts and count the verdicts; raises SilentlyWrong with the smallest script that differs.

    `others` gets the first script of each kind of refusal or crash.
    """
    counts: Counter[str] = Counter()

    @seed(start)
    @settings(max_examples=cases, database=None, deadline=None, suppress_health_check=list(HealthCheck),
              phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False)
    @given(KINDS["scripts"] if of is None else of)
    def one(text: str) -> None:
        outcome = ranks.judge(text, mesh)
        assume(outcome.verdict != "unfit")
        counts[outcome.verdict] += 1
        if outcome.verdict == "different":
            raise SilentlyWrong(f"{outcome.detail}\non {mesh}, this script:\n\n{text}")
        if outcome.verdict != "same" and others is not None:
            others.setdefault(f"{outcome.verdict} on {mesh}: {in_short(outcome.detail)}", f"{outcome.detail}\n\n{text}")

    with contextlib.redirect_stdout(io.StringIO()):  # the ranks' output
        one()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", action="append", choices=list(MESHES))
    parser.add_argument("--of", choices=list(KINDS), default="scripts")
    parser.add_argument("--script", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    meshes = asked.mesh or list(MESHES)
    wrong, total = 0, {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder))
        for number, mesh in enumerate(meshes):
            if asked.script:
                print(mesh, ranks.judge(asked.script.read_text(), mesh))
                continue
            others: dict[str, str] = {}
            try:
                share = asked.cases // len(meshes) + (number < asked.cases % len(meshes))
                total[mesh] = search(ranks, mesh, share, asked.seed + number, others, KINDS[asked.of])
                print(mesh, dict(total[mesh]), flush=True)
            except SilentlyWrong as error:
                wrong += 1
                print(f"silently wrong: {error}", flush=True)
            for name, text in others.items():
                print(f"--- {name}\n{text}", flush=True)
        ranks.stop()
    if asked.json:
        asked.json.write_text(json.dumps(total, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

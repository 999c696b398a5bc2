"""All uses on all meshes: `python -m tests.scripts` prints what came of each and the counts, `--json FILE` keeps them.

Arguments are families or uses (`loops`, `loops.accumulates`); without any, all of them. `--mesh dp` runs on one mesh only,
`--in-turn` each on the one mesh that the tests give it. Ends with 1 if a use does not do what is expected of it.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.scripts.compare import VERDICTS, Outcome, in_short
from tests.scripts.launch import Case, outcomes
from tests.scripts.use import FURTHER, MESHES, families, find, in_turn, uses_of
from tests.scripts.verdict import complaint

TOGETHER = 30  # to one launch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mesh", action="append", choices=[*MESHES, *FURTHER])
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--failed", type=Path, help="only what was not the same in this file of --json")
    parser.add_argument("--verbose", action="store_true", help="the whole of what went wrong, and the ranks' output")
    asked = parser.parse_args()
    wanted = [use for family in families() for use in uses_of(family)
              if not asked.names or family in asked.names or use.name in asked.names]
    turns = {use.name: mesh for use, mesh in in_turn()}  # of those that the tests run
    results: dict[str, dict[str, Outcome]] = {}
    complaints = []
    start = time.monotonic()
    cases = [(use.name, mesh) for use in wanted for mesh in asked.mesh or MESHES
             if not asked.in_turn or turns.get(use.name) == mesh]
    if asked.failed:
        before = json.loads(asked.failed.read_text())["uses"]
        cases = [case for case in cases if before.get(case[1], {}).get(case[0], {"verdict": "same"})["verdict"] != "same"]
    for at in range(0, len(cases), TOGETHER):
        for (name, mesh), outcome in run(cases[at:at + TOGETHER], asked.verbose).items():
            results.setdefault(mesh, {})[name] = outcome
            wrong = complaint(find(name), mesh, outcome)
            note = "  (known)" if not wrong and outcome.verdict in ("different", "crashed") else ""
            detail = outcome.detail if asked.verbose else in_short(outcome.detail)
            print(f"{mesh:9} {name:45} {outcome.verdict:9} {outcome.seconds:5.1f} s{note}  {detail}", flush=True)
            complaints += [wrong] if wrong else []
        _save(asked.json, results)
    _table(results, time.monotonic() - start)
    for wrong in complaints:
        print(f"unexpected: {wrong if asked.verbose else wrong.splitlines()[0]}")
    return 1 if complaints else 0


def run(cases: list[Case], verbose: bool) -> dict[Case, Outcome]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stdout if verbose else io.StringIO()):
        return outcomes(Path(folder), cases)


def _save(path: Path | None, results: dict[str, dict[str, Outcome]]) -> None:
    if path is None:
        return
    counts = {mesh: Counter(o.verdict for o in found.values()) for mesh, found in results.items()}
    uses = {mesh: {name: asdict(o) for name, o in found.items()} for mesh, found in results.items()}
    path.write_text(json.dumps({"counts": counts, "uses": uses}, indent=1))


def _table(results: dict[str, dict[str, Outcome]], seconds: float) -> None:
    print(f"\n{'':10}" + "".join(f"{verdict:>11}" for verdict in (*VERDICTS, "uses")))
    for mesh, found in results.items():
        counts = Counter(outcome.verdict for outcome in found.values())
        print(f"{mesh:10}" + "".join(f"{counts[verdict]:11}" for verdict in VERDICTS) + f"{len(found):11}")
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())

"""All entries of torch's database of operators (OpInfo): each strategy of each rule, and training on two ranks.

`python -m tests.operators` judges every entry at rule level (`rules`), what it is taken apart into (`decompositions`),
between two linear layers on two ranks (`ranks`), in eager code on what a compiled graph returned (`outputs`), and what DTensor
can split (`dtensor`). `--level` asks for some of these,
arguments for entries (shell patterns), `--part 0/2` for half of them. `--json FILE` keeps what is known; a second call with it
goes on from there. Ends with 1 if anything is wrong.
"""
from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.operators import database, dtensor, rule_level
from tests.operators.decompositions import differences
from tests.scripts import opinfo, opinfo_outputs
from tests.scripts.compare import in_short
from tests.scripts.launch import outcomes

LEVELS = ("rules", "decompositions", "ranks", "outputs", "dtensor")
FAMILIES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "ranks": ("opinfo", opinfo.choose), "outputs": (opinfo_outputs.FAMILY, opinfo_outputs.choose)}
MESHES = ("dp", "tp")
TOGETHER = 20
WRONG = {"wrong", "different", "crashed"}
Record = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.operators", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--level", action="append", choices=LEVELS)
    parser.add_argument("--part", default="0/1", help="k/n: every n-th entry from the k-th on")
    parser.add_argument("--uneven", action="store_true", help="samples in torch's own sizes, which 2 and 3 often do not divide")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    part, of = map(int, asked.part.split("/"))
    names = [n for n in database.entries() if not asked.names or any(fnmatch.fnmatch(n, p) for p in asked.names)][part::of]
    known = _known(asked.json)
    start = time.monotonic()
    for level in asked.level or LEVELS:
        missing = [n for n in names if (level, n) not in known]
        for record in _run(level, missing, database.UNEVEN if asked.uneven else None):
            known[level, record["name"]] = record
            print(f"{level:15}{record['name']:45}{record['how']:12}{in_short(record['detail'])}", flush=True)
            if asked.json is not None:
                with asked.json.open("a") as file:
                    file.write(json.dumps({"level": level, **record}) + "\n")
    wrong = _table({key: record for key, record in known.items() if key[1] in names}, time.monotonic() - start)
    return 1 if wrong else 0


def _known(path: Path | None) -> dict[tuple[str, str], Record]:
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {(record["level"], record["name"]): record for record in map(json.loads, lines)}


def _run(level: str, names: Sequence[str], of: dict[str, int] | None) -> Iterator[Record]:
    if level in FAMILIES:
        for at in range(0, len(names), TOGETHER):
            yield from _on_ranks(names[at : at + TOGETHER], *FAMILIES[level])
        return
    for name in names:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            try:
                yield {"rules": _rules, "decompositions": _decompositions, "dtensor": dtensor.judge}[level](name, of)
            except Exception as error:  # one entry that cannot be judged must not end the others
                yield {"name": name, "how": "crashed", "detail": f"{type(error).__name__}: {error}"}


def _rules(name: str, of: dict[str, int] | None) -> Record:
    verdict = rule_level.judge(name, of=of)
    detail = " | ".join(verdict.wrong) or ", ".join(verdict.unruled) or verdict.why
    return {"name": name, "how": verdict.how, "detail": detail, "runs": verdict.runs, "unruled": verdict.unruled}


def _decompositions(name: str, of: dict[str, int] | None) -> Record:
    found = differences(name, of=of)
    return {"name": name, "how": "wrong" if found else "same", "detail": " | ".join(found[:3])}


def _on_ranks(names: Sequence[str], family: str, choose: Callable[[str], Any]) -> list[Record]:
    chosen = {name: choose(name) is not None for name in names}
    cases = [(f"{family}.{name}", mesh) for name in names if chosen[name] for mesh in MESHES]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        found = outcomes(Path(folder), cases) if cases else {}
    records = []
    for name in names:
        own = {mesh: found[f"{family}.{name}", mesh] for mesh in MESHES if chosen[name]}
        hows = {("not compiled" if "0 graphs came" in o.detail else o.verdict) for o in own.values()} or {"no sample"}
        worst = next(how for how in ("different", "crashed", "refused", "not compiled", "same", "no sample") if how in hows)
        detail = " | ".join(f"{mesh}: {o.detail}" for mesh, o in own.items() if o.detail)
        records.append({"name": name, "how": worst, "detail": detail[-3000:]})
    return records


def _table(known: dict[tuple[str, str], Record], seconds: float) -> int:
    """Prints the counts; returns how many entries are wrong."""
    wrong = 0
    print()
    for level in LEVELS:
        own = [record for (its, _), record in known.items() if its == level]
        counts = Counter(record["how"] for record in own)
        if own:
            runs = sum(record.get("runs", 0) for record in own)
            print(f"{level:15}{len(own):5} entries: " + ", ".join(f"{n} {how}" for how, n in counts.most_common())
                  + (f"; {runs} comparisons" if runs else ""))
        wrong += sum(n for how, n in counts.items() if how in WRONG)
    unruled = Counter(target for record in known.values() for target in record.get("unruled", ()))
    if unruled:
        print("without a rule: " + ", ".join(f"{target} ({n})" for target, n in unruled.most_common()))
    print(f"{seconds:.0f} s")
    return wrong


if __name__ == "__main__":
    sys.exit(main())

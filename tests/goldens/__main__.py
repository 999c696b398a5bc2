"""Record what scripts are compiled to and what they compute, or compare with what was recorded on another commit.

    python -m tests.goldens --models MODELS.py --write before.jsonl
    python -m tests.goldens --models MODELS.py --against before.jsonl --write after.jsonl

Each use of tests/scripts, and each model of a file (`build(name)` gives a model and its batch, for each name of `MODELS`), is
trained by options and numbers of ranks as in cases.py. Kept for each rank: digests of the graphs that lowering receives, their
collectives with shapes and groups, messages between stages, plans without seconds, and a digest of all results. A case that
stands in the file of `--write` is not run again. Ends with 1 where anything differs.
"""
from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import itertools
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from tests.goldens.cases import Case, cases
from tests.goldens.run import recorded
from tests.scripts.compare import in_short
from tests.scripts.fuzz_ranks import Ranks

PER_LAUNCH = 40
LIMIT_S = 120
Lines = dict[tuple[str, str], dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="patterns of names; without any, all")
    parser.add_argument("--place", action="append", help="only these options")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--every", type=int, default=1, help="one case of so many")
    asked = parser.parse_args()
    wanted = [case for case in cases(asked.models) if asked.place is None or case.place in asked.place]
    wanted = [case for case in wanted if any(fnmatch.fnmatch(case.name, name) for name in asked.names or ["*"])
              and zlib.crc32(repr(key_of(case)).encode()) % asked.every == 0]
    known = read(asked.write)
    run([case for case in wanted if key_of(case) not in known], asked.write)
    if asked.against is None:
        return 0
    return compare(read(asked.against), {key_of(case): read(asked.write)[key_of(case)] for case in wanted})


def key_of(case: Case) -> tuple[str, str]:
    """Where the file of models lies does not matter."""
    return case.name.rpartition("/")[2], case.place


def read(path: Path) -> Lines:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(line["name"], line["place"]): line for line in map(json.loads, lines)}


def run(wanted: list[Case], path: Path) -> None:
    os.environ.update(HPML_CACHE="0", HPML_QUICK_PROFILE="0")
    with tempfile.TemporaryDirectory() as folder:
        ranks = {count: Ranks(Path(folder), recorded, count, LIMIT_S) for count in (1, 2)}
        for case in wanted:
            here = ranks[case.ranks]
            with contextlib.redirect_stdout(io.StringIO()):  # the ranks' output
                outcome = here.judge(case.name, case.place)
                written = sorted(here.here.glob("*.record"))
            name, place = key_of(case)
            line = {"name": name, "place": place, "verdict": outcome.verdict, "detail": outcome.detail[:300],
                    "digest": outcome.digest, "ranks": [json.loads(each.read_text()) for each in written]}
            for each in written:
                each.unlink()
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{place:13} {name:45} {outcome.verdict:9} {outcome.seconds:5.1f} s  {in_short(outcome.detail)}",
                  file=sys.stderr, flush=True)
            if here.number >= PER_LAUNCH:
                here.stop()
        for each in ranks.values():
            each.stop()


def compare(before: Lines, after: Lines) -> int:
    """Print what differs, and counts."""
    differ = 0
    for case, line in after.items():
        found = differences(before[case], line) if case in before else ["is not in the other file"]
        differ += bool(found)
        for each in found:
            print(f"{case[1]:13} {case[0]:45} {each}")
    print(f"{len(after)} cases, {differ} differ")
    return int(differ > 0)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = [f"{field}: {before[field]!r}, now {after[field]!r}"
             for field in ("verdict", "digest") if before[field] != after[field]]
    for rank, (one, other) in enumerate(zip(before["ranks"], after["ranks"])):
        found += [f"rank {rank}: {field}: {first_difference(one[field], other[field])}"
                  for field in one if one[field] != other[field]]
    return found


def first_difference(before: list[str], after: list[str]) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after))
    at = sum(1 for _ in same)
    return f"{len(before)} before, {len(after)} now; number {at} was {before[at:at + 1]}, is {after[at:at + 1]}"


if __name__ == "__main__":
    sys.exit(main())

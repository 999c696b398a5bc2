"""Train by combinations of options, and compare with one device.

    python -m tests.combinations --ranks 2 --json pairs.jsonl              # all pairs of values; a second call continues
    python -m tests.combinations --ranks 2 --random 200 --json random.jsonl

Six small models in float64, compiler "eager": losses, parameters and the optimizer's state after two steps are compared to 1e-9
with a script that is not compiled. --peaks adds the peak of a step: measured, predicted, and the budget if there is one.
Predictions are judged below budgets, where hpml decides what is saved; others are for inductor's partitioner.
Ends with 1 where any combination differs or crashes; peaks are only counted.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.combinations.covering import covering, randoms
from tests.combinations.judge import judged
from tests.combinations.space import chosen_of, is_meant, refusal, values
from tests.scripts.compare import Outcome, in_short
from tests.scripts.fuzz_ranks import Ranks

LIMIT_S, PER_LAUNCH = 300, 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2)
    parser.add_argument("--random", type=int, default=0, help="so many random combinations instead of all pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--first", type=int, help="only so many")
    parser.add_argument("--peaks", action="store_true", help="measure the peak of a step, too")
    asked = parser.parse_args()
    allowed = lambda each: is_meant(chosen_of(each, asked.ranks))  # noqa: E731
    space = values(asked.ranks)
    found = randoms(space, allowed, asked.random, asked.seed) if asked.random else covering(space, allowed, asked.seed)
    wanted = [json.dumps(chosen_of(each, asked.ranks), sort_keys=True) for each in found[:asked.first]]
    known = {json.dumps(line["chosen"], sort_keys=True) for line in lines(asked.json)}
    run([each for each in wanted if each not in known], asked.ranks, asked.json, asked.peaks)
    there = lines(asked.json)
    verdicts = Counter(line["verdict"] for line in there)
    print(f"{len(there)} combinations on {asked.ranks} ranks: {dict(verdicts)}", *summary(there), sep="\n")
    return int(bool(verdicts["different"] or verdicts["crashed"]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(found: list[dict[str, Any]]) -> Iterator[str]:
    """Refusals by their words, and how peaks compare with budgets and predictions."""
    refusals = Counter(re.sub(r"\d[\d.]*", "N", line["detail"]) for line in found if line["verdict"] == "refused")
    yield from (f"{number:4} refused: {words}" for words, number in refusals.most_common())
    below = [line["memory"] for line in found if "budget" in line["memory"]]
    ratios = {"peak / budget": (1.03, [each["peak"] / each["budget"] for each in below]),
              "|predicted / peak - 1|": (0.05, [abs(each["predicted"] / each["peak"] - 1) for each in below])}
    for name, (most, each) in ratios.items():
        if each:
            yield f"{name}: at most {max(each):.3f}; {sum(one > most for one in each)} of {len(each)} are above {most}"


def run(wanted: list[str], count: int, path: Path, peaks: bool) -> None:
    os.environ["HPML_QUICK_PROFILE"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HPML_CACHE_DIR"] = folder
        ranks = Ranks(Path(folder), judged, count, LIMIT_S)
        for text in wanted:
            chosen = json.loads(text)
            words = refusal(chosen)
            if words is None:
                with contextlib.redirect_stdout(io.StringIO()):  # the ranks' output
                    outcome = ranks.judge(text, peaks)
            else:
                outcome = Outcome("refused", words)
            with path.open("a") as file:
                file.write(json.dumps({"chosen": chosen, "verdict": outcome.verdict, "detail": outcome.detail,
                                       "seconds": outcome.seconds, "memory": outcome.memory}) + "\n")
            told = {name: value for name, value in chosen.items() if value not in (None, "auto", "off", 1, {})}
            print(f"{outcome.verdict:9} {outcome.seconds:5.1f} s  {told}  {outcome.memory or ''}  {in_short(outcome.detail)}",
                  file=sys.stderr)
            if ranks.number >= PER_LAUNCH:
                ranks.stop()
        ranks.stop()


if __name__ == "__main__":
    sys.exit(main())

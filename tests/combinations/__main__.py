"""Train by combinations of options, and compare with one device.

    python -m tests.combinations --ranks 2 --json pairs.jsonl              # all pairs of values; a second call continues
    python -m tests.combinations --ranks 2 --random 200 --json random.jsonl

Small models in float64, compiler "eager", dropout 0.2: numbers are compared to 1e-9 with a script that is not compiled. Ends
with 1 where any differs or crashes.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.combinations.covering import covering, randoms
from tests.combinations.judge import judged
from tests.combinations.space import chosen_of, is_meant, refusal, values
from tests.scripts.compare import Outcome, in_short
from tests.scripts.fuzz_ranks import Ranks

LIMIT_S, PER_LAUNCH = 90, 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2)
    parser.add_argument("--random", type=int, default=0, help="so many random combinations instead of all pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--first", type=int, help="only so many")
    asked = parser.parse_args()
    allowed = lambda each: is_meant(chosen_of(each, asked.ranks))  # noqa: E731
    space = values(asked.ranks)
    found = randoms(space, allowed, asked.random, asked.seed) if asked.random else covering(space, allowed, asked.seed)
    wanted = [json.dumps(chosen_of(each, asked.ranks), sort_keys=True) for each in found[:asked.first]]
    known = {json.dumps(line["chosen"], sort_keys=True) for line in lines(asked.json)}
    run([each for each in wanted if each not in known], asked.ranks, asked.json)
    verdicts = Counter(line["verdict"] for line in lines(asked.json))
    print(f"{sum(verdicts.values())} combinations on {asked.ranks} ranks: {dict(verdicts)}")
    return int(bool(verdicts["different"] or verdicts["crashed"]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(wanted: list[str], count: int, path: Path) -> None:
    os.environ["HPML_QUICK_PROFILE"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HPML_CACHE_DIR"] = folder
        ranks = Ranks(Path(folder), judged, count, LIMIT_S)
        for text in wanted:
            chosen = json.loads(text)
            words = refusal(chosen)
            if words is None:
                with contextlib.redirect_stdout(io.StringIO()):  # the ranks' output
                    outcome = ranks.judge(text)
            else:
                outcome = Outcome("refused", words)
            with path.open("a") as file:
                file.write(json.dumps({"chosen": chosen, "verdict": outcome.verdict, "detail": outcome.detail,
                                       "seconds": outcome.seconds}) + "\n")
            told = {name: value for name, value in chosen.items() if value not in (None, "auto", "off", 1, {})}
            print(f"{outcome.verdict:9} {outcome.seconds:5.1f} s  {told}  {in_short(outcome.detail)}", file=sys.stderr)
            if ranks.number >= PER_LAUNCH:
                ranks.stop()
        ranks.stop()


if __name__ == "__main__":
    sys.exit(main())

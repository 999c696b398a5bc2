"""Hugging Face architectures, split and on one device: `python -m tests.zoo` prints what came of each and the counts.

Arguments are names of architectures or patterns (`llama 'qwen*'`), judged in this order; without any, all of them. `--mesh dp`
runs on one mesh only, "plan" is `hpml plan`. `--results FILE` keeps each outcome as a line of JSON, and what stands there
already is not run again; `--again different,crashed` runs those once more. `--report` only prints what the file holds.
"""
from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from tests.scripts.compare import Outcome, in_short
from tests.scripts.fuzz_ranks import Ranks
from tests.zoo.judge import Result, judged
from tests.zoo.models import architectures

MESHES = ("dp", "tp", "stages", "zero3", "unpinned", "plan")
VERDICTS = ("same", "refused", "torch", "different", "crashed", "unfit")
LIMIT_S, PER_LAUNCH = 180, 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mesh", action="append", choices=MESHES)
    parser.add_argument("--results", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument("--again", default="", metavar="VERDICTS", help="run once more what came out so")
    parser.add_argument("--workers", type=int, default=1, help="launches side by side")
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    names = list(dict.fromkeys(name for pattern in asked.names or ["*"]
                               for name in fnmatch.filter(architectures(), pattern)))
    known = read(asked.results)
    cases = [(name, mesh) for name in names for mesh in asked.mesh or MESHES
             if (name, mesh) not in known or known[name, mesh]["verdict"] in asked.again.split(",")]
    if not asked.report:
        run(cases, asked.results, asked.workers)
    wanted = {case: line for case, line in read(asked.results).items()
              if case[0] in names and case[1] in (asked.mesh or MESHES)}
    report(wanted)
    return int(any(line["verdict"] in ("different", "crashed") for line in wanted.values()))


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last outcome of each case."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(line["architecture"], line["mesh"]): line for line in map(json.loads, lines)}


def run(cases: list[tuple[str, str]], results: Path, workers: int) -> None:
    """Judge all cases, those of one architecture after another, with `workers` launches of ranks at a time."""
    queue: Queue[list[tuple[str, str]]] = Queue()
    for name in dict.fromkeys(name for name, _ in cases):
        queue.put([case for case in cases if case[0] == name])
    lock = threading.Lock()

    def keep(name: str, mesh: str, outcome: Outcome) -> None:
        line = {"architecture": name, "mesh": mesh, **asdict(outcome)}
        with lock, results.open("a") as file:
            file.write(json.dumps(line) + "\n")
            print(f"{mesh:9} {name:30} {outcome.verdict:9} {outcome.seconds:5.1f} s  {in_short(outcome.detail)}",
                  file=sys.stderr, flush=True)

    threads = [threading.Thread(target=_work, args=(queue, keep)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(queue: Queue[list[tuple[str, str]]], keep: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # the ranks' output
        two, one = Ranks(Path(folder), judged, limit_s=LIMIT_S), Ranks(Path(folder), judged, 1, LIMIT_S)
        with contextlib.suppress(Empty):
            while True:
                for name, mesh in queue.get_nowait():
                    ranks = one if mesh == "plan" else two
                    outcome = ranks.judge(name, mesh)
                    keep(name, mesh, outcome if isinstance(outcome, Result) else Result(**vars(outcome)))
                    if ranks.number >= PER_LAUNCH:
                        ranks.stop()
        two.stop()
        one.stop()


def report(lines: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Counts by mesh; refusals, differences and crashes one by one; operators without a rule."""
    print(f"{'':9}" + "".join(f"{verdict:>11}" for verdict in (*VERDICTS, "all")))
    for mesh in MESHES:
        counts = Counter(line["verdict"] for (_, at), line in lines.items() if at == mesh)
        if counts:
            print(f"{mesh:9}" + "".join(f"{counts[verdict]:11}" for verdict in VERDICTS) + f"{counts.total():11}")
    for verdict in VERDICTS[1:-1]:
        for (name, mesh), line in lines.items():
            if line["verdict"] == verdict:
                print(f"{verdict:9} {mesh:9} {name:30} {in_short(line['detail'])}")
    missing = Counter(target for line in lines.values() for target in set(line["replicated"]))
    for target, cases in missing.most_common():
        print(f"replicated for want of a rule in {cases} cases: {target}")


if __name__ == "__main__":
    sys.exit(main())

"""The table of losses and metrics outside of models, by meshes: `python -m tests.scripts.table_of_losses`.

Runs `tests.scripts.losses`, `loss_loops` and `output_reads` on meshes, in float64, to 1e-12. `--mesh dp` runs on one of them,
arguments are names or parts of names, `--json FILE` keeps each verdict as a line, and what stands there already is not run
again. Also counts where the script's work on outputs ran (several places are possible). Ends with 1 if any differs or crashes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.scripts.__main__ import TOGETHER, run
from tests.scripts.compare import VERDICTS, in_short
from tests.scripts.use import FOUR_RANKS, FURTHER, MESHES, uses_of

FAMILIES = ("losses", "loss_loops", "output_reads")
OUTSIDE = ("dp", "tp", "zero3", "parts", "dp4", "stages")
PLACES = ("in the step", "on shards", "gathered")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.table_of_losses", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mesh", action="append", choices=[*MESHES, *FURTHER, *FOUR_RANKS])
    parser.add_argument("--part", default="0/1", help="k/n: every n-th use from the k-th on")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    names = [
        use.name
        for family in FAMILIES
        for use in uses_of(family)
        if not asked.names or any(part in use.name for part in asked.names)
    ]
    part, of = map(int, asked.part.split("/"))
    names = names[part::of]
    with tempfile.TemporaryDirectory() as folder:
        file = asked.json or Path(folder, "losses.jsonl")
        meshes = asked.mesh or OUTSIDE
        for mesh in meshes:
            known = read(file)
            left = [(name, mesh) for name in names if (name, mesh) not in known]
            for at in range(0, len(left), TOGETHER):
                for (name, _), outcome in run(left[at : at + TOGETHER], verbose=False).items():
                    with file.open("a") as lines:
                        lines.write(json.dumps([name, mesh, outcome.verdict, outcome.detail, outcome.outputs]) + "\n")
                    if outcome.verdict != "same":
                        print(f"{mesh}: {name}: {outcome.verdict}: {in_short(outcome.detail)}", flush=True)
        known = read(file)
    columns = (*VERDICTS, *PLACES)
    print(f"\n{'':12}" + "".join(f"{column:>13}" for column in columns))
    for mesh in meshes:
        counts = Counter(word for name in names for word in known[name, mesh])
        print(f"{mesh:12}" + "".join(f"{counts[column]:13}" for column in columns))
    return int(any({"different", "crashed"} & {*known[name, mesh]} for name in names for mesh in meshes))


def read(path: Path) -> dict[tuple[str, str], tuple[str, ...]]:
    """(name, mesh) -> its last verdict, and where the work on outputs ran."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(name, mesh): (verdict, *outputs) for name, mesh, verdict, _, outputs in map(json.loads, lines)}


if __name__ == "__main__":
    sys.exit(main())

"""The table of custom autograd Functions: `python -m tests.scripts.table_of_functions` prints forms by meshes.

Each number says in how many places of a model (`tests.scripts.functions.PLACES`) a form does on a mesh what it does on one
device. `plan` counts those that `hpml_compiler.plan` plans on two devices, on each of these meshes. Ends with 1 unless that is
all of them. Arguments are names of forms; `--mesh dp` runs on one mesh only, `--mesh plan` plans only. `--results FILE` keeps
each verdict as a line of JSON, and what stands there already is not run again.
"""
from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

import hpml_compiler
from passes.errors import HpmlError
from tests.scripts.__main__ import TOGETHER, run
from tests.scripts.compare import VERDICTS, Outcome, in_short
from tests.scripts.functions import FORMS, PLACES, Net
from tests.scripts.models import inputs, targets
from tests.scripts.use import FURTHER, MESHES

PLANS = MESHES | {name: options for name, options in FURTHER.items() if name != "budget"}
Case = tuple[str, str, str]
"""Form, place and mesh. The mesh of a plan on dp is "plan dp"."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.table_of_functions", description=__doc__)
    parser.add_argument("forms", nargs="*", help=", ".join(FORMS))
    parser.add_argument("--mesh", action="append", choices=[*MESHES, *FURTHER, "plan"])
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    forms, meshes = asked.forms or list(FORMS), asked.mesh or [*MESHES, *FURTHER, "plan"]
    runs = list(itertools.product(forms, PLACES, [mesh for mesh in meshes if mesh != "plan"]))
    plans = list(itertools.product(forms, PLACES, [f"plan {mesh}" for mesh in PLANS if "plan" in meshes]))
    with tempfile.TemporaryDirectory() as folder:
        results = asked.results or Path(folder, "results.jsonl")
        known = read(results)
        left = [case for case in runs if case not in known]
        for at in range(0, len(left), TOGETHER):
            cases = {(f"functions.{form}_{place}", mesh): (form, place, mesh) for form, place, mesh in left[at:at + TOGETHER]}
            for named, outcome in run(list(cases), verbose=False).items():
                keep(results, cases[named], outcome)
        for case in plans:
            if case not in known:
                keep(results, case, planned(*case))
        verdicts = read(results)
    return report({case: verdicts[case] for case in runs + plans}, meshes)


def read(path: Path) -> dict[Case, str]:
    """Case -> its last verdict."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(form, place, mesh): verdict for form, place, mesh, verdict, _ in map(json.loads, lines)}


def keep(path: Path, case: Case, outcome: Outcome) -> None:
    with path.open("a") as file:
        file.write(json.dumps([*case, outcome.verdict, outcome.detail]) + "\n")
    if outcome.verdict != "same":
        form, place, mesh = case
        print(f"{mesh}: {form} at {place}: {outcome.verdict}: {in_short(outcome.detail)}", flush=True)


def planned(form: str, place: str, mesh: str) -> Outcome:
    """"same" if the model has a plan."""
    model = Net(form, place).double()
    torch._dynamo.reset()
    try:
        plan = hpml_compiler.plan(model, (inputs(), targets(width=16)), "1x2:cpu", compiler="eager",
                                  **PLANS[mesh.removeprefix("plan ")])
    except HpmlError as error:
        return Outcome("refused", error.what)
    return Outcome("same") if plan.graphs else Outcome("different", "the plan has no graph")


def report(verdicts: dict[Case, str], meshes: list[str]) -> int:
    """Print how many cases of each form and mesh are the same, and all verdicts of each mesh."""
    columns = {mesh: {case: verdict for case, verdict in verdicts.items() if case[2].split()[0] == mesh} for mesh in meshes}
    same = Counter((form, mesh) for mesh, cases in columns.items() for (form, _, _), verdict in cases.items()
                   if verdict == "same")
    print(f"\n{'':34}" + "".join(f"{mesh:>9}" for mesh in meshes))
    for form in dict.fromkeys(form for form, _, _ in verdicts):
        print(f"{form:34}" + "".join(f"{same[form, mesh]:>9}" for mesh in meshes))
    for verdict in VERDICTS:
        print(f"{verdict:34}" + "".join(f"{sum(found == verdict for found in columns[mesh].values()):>9}" for mesh in meshes))
    return int(any(verdict != "same" for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())

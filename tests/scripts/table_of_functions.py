"""The table of custom autograd Functions: `python -m tests.scripts.table_of_functions` prints forms by meshes.

Each number says in how many places of a model (`tests.scripts.functions.PLACES`) a form does on a mesh what it does on one
device. `plan` counts those that `hpml_compiler.plan` plans on two devices, on each of these meshes. Ends with 1 unless that is
all of them. Arguments are names of forms; `--mesh dp` runs on one mesh only, `--mesh plan` plans only.
"""
from __future__ import annotations

import argparse
import itertools
import sys

import torch

import hpml_compiler
from passes.errors import HpmlError
from tests.scripts.__main__ import TOGETHER, run
from tests.scripts.compare import in_short
from tests.scripts.functions import FORMS, PLACES, Net
from tests.scripts.models import inputs, targets
from tests.scripts.use import FURTHER, MESHES

PLANS = MESHES | {name: options for name, options in FURTHER.items() if name != "budget"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.table_of_functions", description=__doc__)
    parser.add_argument("forms", nargs="*", help=", ".join(FORMS))
    parser.add_argument("--mesh", action="append", choices=[*MESHES, *FURTHER, "plan"])
    asked = parser.parse_args()
    forms, meshes = asked.forms or list(FORMS), asked.mesh or [*MESHES, *FURTHER, "plan"]
    good: dict[tuple[str, str], int] = {}
    cases = [(f"functions.{form}_{place}", mesh) for form, place in itertools.product(forms, PLACES)
             for mesh in meshes if mesh != "plan"]
    for at in range(0, len(cases), TOGETHER):
        for (name, mesh), outcome in run(cases[at:at + TOGETHER], verbose=False).items():
            form = next(form for form in forms if name.removeprefix("functions.").removeprefix(form).lstrip("_") in PLACES)
            good[form, mesh] = good.get((form, mesh), 0) + (outcome.verdict == "same")
            if outcome.verdict != "same":
                print(f"{mesh}: {name}: {outcome.verdict}: {in_short(outcome.detail)}", flush=True)
    if "plan" in meshes:
        for form in forms:
            good[form, "plan"] = sum(planned(form, place, mesh) for place in PLACES for mesh in PLANS)
    most = {mesh: len(PLACES) * (len(PLANS) if mesh == "plan" else 1) for mesh in meshes}
    print(f"\n{'':34}" + "".join(f"{mesh:>9}" for mesh in meshes))
    for form in forms:
        print(f"{form:34}" + "".join(f"{good.get((form, mesh), 0):>9}" for mesh in meshes))
    print(f"{'of':34}" + "".join(f"{most[mesh]:>9}" for mesh in meshes))
    return 0 if all(good.get((form, mesh)) == most[mesh] for form in forms for mesh in meshes) else 1


def planned(form: str, place: str, mesh: str) -> bool:
    """Whether the model is planned, all of its trained parameters in the plan."""
    model = Net(form, place).double()
    torch._dynamo.reset()
    try:
        plan = hpml_compiler.plan(model, (inputs(), targets(width=16)), "1x2:cpu", compiler="eager", **PLANS[mesh])
    except HpmlError as error:
        print(f"plan, {mesh}: {form} at {place}: {error.what}", flush=True)
        return False
    return bool(plan.graphs)


if __name__ == "__main__":
    sys.exit(main())

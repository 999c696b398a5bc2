"""The table of public optimizers: `python -m tests.scripts.table_of_optimizers` trains with each on two ranks.

Arguments are names (`timm.lamb`) or packages (`timm`); without any, all of what is installed. `--mesh dp` runs on another mesh
than `tp` and `zero3`. `rounding` counts those that one device, too, trains otherwise if the weights that it begins with are
changed by 1e-15: SOAP takes eigenvectors of a matrix of low rank. Ends with 1 if another one is different, or crashes.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.scripts.__main__ import TOGETHER, run
from tests.scripts.compare import VERDICTS, in_short, seen
from tests.scripts.snapshot import difference
from tests.scripts.use import FURTHER, MESHES, Script, Use, find, uses_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.table_of_optimizers", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mesh", action="append", choices=[*MESHES, *FURTHER])
    asked = parser.parse_args()
    meshes = asked.mesh or ["tp", "zero3"]
    fit = [use for use in uses_of("optimizers") if wanted(use, asked.names) and runs_on_one_device(use)]
    cases = [(use.name, mesh) for use in fit for mesh in meshes]
    verdicts = [*VERDICTS, "rounding"]
    counts: Counter[tuple[str, str, str]] = Counter()
    for at in range(0, len(cases), TOGETHER):
        for (name, mesh), outcome in run(cases[at:at + TOGETHER], verbose=False).items():
            verdict = outcome.verdict
            if verdict == "different" and "differ, first" in outcome.detail and is_ill_conditioned(find(name)):
                verdict = "rounding"
            counts[package_of(name), mesh, verdict] += 1
            if verdict != "same":
                print(f"{mesh}: {name}: {verdict}: {in_short(outcome.detail)}", flush=True)
    print(f"\n{'':20}" + "".join(f"{mesh + ' ' + verdict:>18}" for mesh in meshes for verdict in verdicts))
    for package in dict.fromkeys(package_of(use.name) for use in fit):
        print(f"{package:20}" + "".join(f"{counts[package, mesh, verdict]:>18}" for mesh in meshes for verdict in verdicts))
    return 1 if any(counts[key] for key in counts if key[2] in ("different", "crashed")) else 0


def package_of(name: str) -> str:
    return name.split(".")[1]


def wanted(use: Use, names: list[str]) -> bool:
    return not names or package_of(use.name) in names or use.name.removeprefix("optimizers.") in names


def runs_on_one_device(use: Use) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            seen(use, Script(None, Path(folder)))
        except Exception as error:
            print(f"{use.name} does not run on one device: {type(error).__name__}: {str(error)[:120]!r}", flush=True)
            return False
    return True


class Nudged(Script):
    """One device, whose weights are changed by 1e-15 of themselves."""

    def compile(self, model: Any, **options: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-15 * torch.randn(parameter.shape, generator=generator))
        return model


def is_ill_conditioned(use: Use) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        one, other = (seen(use, kind(None, Path(folder))) for kind in (Script, Nudged))
    return bool(difference(one, other, use.tolerance))


if __name__ == "__main__":
    sys.exit(main())

"""Everything that hpml does, once on this machine's GPU, in one command of at most ten minutes: `make gpu`.

    python benchmarks/gpu_pass.py [--models MODELS.py] [--packages FOLDER] [--out RESULT.json] [--device cpu]

Each check (see `gpu_checks.py`) runs in processes of its own with a time limit, so that one that fails hides no other:
collectives; models on two ranks against eager mode on one device, in float64 and autocast; step time beside inductor's;
the script's loss in the step; a run that is resumed; peaks below memory budgets; a step that runs out of memory; a run with
its monitor, memory and energy; `hpml profile`; NVML; a large vocabulary beside inductor and liger-kernel. Two ranks share the
GPU over gloo where there is only one. Prints a table and one line of JSON; the exit code is 0 if all checks were run and
passed.

Nothing is installed or fetched. MODELS.py has `MODELS` and `build(name) -> (model, batch)`; by default small models that
need torch alone. FOLDER has wheels for packages that the machine lacks (`make gpu-wheels` fetches them elsewhere), which
are unpacked beside each other and put on the path.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LAST_LINES, LAST_LINES_LATE = 12, 60
"""Lines of output to show of a check that failed, and of one that ran out of time, which ends with its stack."""


@dataclass(frozen=True)
class Check:
    """name: in `gpu_checks.py`. alone: nothing else runs beside it, since it takes times or counts joules."""

    name: str
    ranks: int = 1
    limit_s: float = 120.0
    model: str = ""
    needs_hpml: bool = True
    alone: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.model}".strip()


def checks(models: list[str]) -> list[Check]:
    """What can run side by side first, then what takes times."""
    return [
        Check("collectives", 2, 60),
        *(Check("model", 2, 150, name) for name in models),
        Check("outputs", 2, 150),
        Check("checkpoint", 2, 150),
        Check("energy", needs_hpml=False, limit_s=60, alone=True),
        Check("step_time", limit_s=150, alone=True),
        *(Check("budget", limit_s=240, model=name, alone=True) for name in ("gpt", "convnet")),
        Check("out_of_memory", limit_s=240, alone=True),
        Check("run", 2, 150, alone=True),
        Check("profile", limit_s=150, alone=True),
        Check("heads", limit_s=280, alone=True),
    ]


def prepare(folder: Path, wheels: Path | None) -> None:
    """In `folder`, which is put on the path: the wheels unpacked, and the entry point by which torch.compile finds hpml."""
    for wheel in sorted(wheels.glob("*.whl")) if wheels is not None else []:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    project = (ROOT / "pyproject.toml").read_text()  # tomllib is younger than Python 3.10
    version = re.search(r'^version = "(.*)"', project, re.MULTILINE)
    entry = re.search(r'^hpml = "(hpml_compiler\.backend:.*)"', project, re.MULTILINE)
    assert version is not None and entry is not None
    info = folder / f"hpml_compiler-{version[1]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hpml-compiler\nVersion: {version[1]}\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\nhpml = {entry[1]}\n")


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "HPML_CACHE_DIR": str(folder / "cache"), "HPML_PG_TIMEOUT_S": "60",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def start(check: Check, args: argparse.Namespace, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one check to its end or its limit. `status`: passed, failed, or out of time."""
    command = [sys.executable, *(["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={check.ranks}"]
                                 if check.ranks > 1 else []),
               str(HERE / "gpu_checks.py"), check.name, "--device", args.device, "--models", args.models,
               *(["--name", check.model] if check.model else [])]
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace", start_new_session=True)
    late = False
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    found = re.findall(r"^RESULT (\{.*\})$", output, re.MULTILINE)
    result: dict[str, Any] = json.loads(found[-1]) if found else {}
    ok = bool(result.pop("ok", False)) and process.returncode == 0 and not late
    result |= {"status": "passed" if ok else "out of time" if late else "failed", "seconds": time.monotonic() - began}
    if not ok:
        done = re.findall(r"^CASE (.*)$", output, re.MULTILINE)
        lines = [line for line in output.splitlines() if "warn" not in line.lower()]
        result["output"] = lines[-(LAST_LINES_LATE if late else LAST_LINES):]
        ended = (f"no result within {limit_s:.0f} s" if late else
                 f"exit code {process.returncode}: {next((x for x in reversed(result['output']) if 'Error' in x), '')[:200]}")
        result.setdefault("says", "; ".join([ended, *done]))
    return result


def all_checks(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    deadline = time.monotonic() + args.seconds
    here = start(Check("environment"), args, folder, 90)
    results = {"environment": here}
    print(f"{here['says']}\n", flush=True)
    wanted = [c for c in checks(args.names) if not args.only or c.name in args.only]

    def one(check: Check) -> None:
        left = deadline - time.monotonic()
        if here["status"] != "passed":
            result = {"status": "not run", "says": "there is no GPU that torch can use", "seconds": 0.0}
        elif check.needs_hpml and here["needed"]:
            result = {"status": "not run", "says": f"needs {', '.join(here['needed'])}; see --packages", "seconds": 0.0}
        elif left < 10:
            result = {"status": "not run", "says": f"the {args.seconds:.0f} s were over", "seconds": 0.0}
        else:
            result = start(check, args, folder, min(check.limit_s, left))
        results[check.label] = result
        print(row(check.label, result), flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, [check for check in wanted if not check.alone]))
    for check in [check for check in wanted if check.alone]:
        one(check)
    return results


def row(label: str, result: dict[str, Any]) -> str:
    return f"{label:<18} {result['status']:<12} {result['seconds']:6.1f} s  {result['says']}"


def names_in(models: str) -> list[str]:
    """The keys of MODELS, read without importing what the file needs."""
    text = Path(models).read_text()
    table = text[re.search(r"^MODELS\b", text, re.MULTILINE).start():]  # pyright: ignore[reportOptionalMemberAccess]
    return re.findall(r'^ {4}"(\w+)": ', table, re.MULTILINE) or re.findall(r"(\w+)=\w+", table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the command itself out")
    parser.add_argument("--models", default=str(HERE / "small_models.py"), help="a file with MODELS and build(name)")
    parser.add_argument("--names", nargs="+", help="of the models; all by default")
    parser.add_argument("--only", nargs="+", help="names of checks; all by default")
    parser.add_argument("--packages", type=Path, help="a folder with wheels")
    parser.add_argument("--out", type=Path, help="where to write the JSON too")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all checks together")
    parser.add_argument("--jobs", type=int, default=max(1, min((os.cpu_count() or 1) // 4, 4)),
                        help="checks side by side, of those that take no times")
    args = parser.parse_args()
    args.names = args.names or names_in(args.models)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpml-gpu-") as folder:
        prepare(Path(folder), args.packages)
        results = all_checks(args, Path(folder))
    bad = [label for label, result in results.items() if result["status"] != "passed"]
    for label in bad:
        print(f"\n{label}: {results[label]['status']}\n  " + "\n  ".join(results[label].get("output", [])))
    print(f"\n{len(results) - len(bad)} of {len(results)} checks passed in {time.monotonic() - began:.0f} s")
    text = json.dumps({"ok": not bad, "device": args.device, "seconds": time.monotonic() - began, "checks": results})
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

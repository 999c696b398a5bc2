"""Checks of `hpml doctor`: each function reports one dependency, and how to get it if it is missing."""
from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from passes.hardware.control_groups import available_cores, memory_bytes

DISTRIBUTION = "hpml-compiler"
BACKEND_GROUP = "torch_dynamo_backends"
GIB = 1 << 30
SMOKE_LIMIT_S = 60
SMOKE_MODULE = "hpml_compiler.commands._gloo_smoke"


@dataclass(frozen=True)
class Check:
    """One line of the report. status: `missing` makes hpml unusable, `warning` only disables a feature."""

    name: str
    status: Literal["ok", "warning", "missing"]
    detail: str
    next_step: str = ""


def run_checks(quick: bool) -> Iterator[Check]:
    """Run all checks in order; those that need torch only if torch is installed."""
    yield check_python()
    yield from check_requirements()
    yield from check_solvers()
    yield check_backend()
    yield check_compiler()
    yield check_dot()
    if _installed("torch"):
        yield from check_devices()
        yield from check_communication()
        if not quick:
            yield check_all_reduce()


def check_python() -> Check:
    """Report the version; pip refuses to install hpml on a Python that is too old."""
    return Check("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def check_requirements() -> Iterator[Check]:
    """Compare installed versions with the distribution's requirements; torch has a line of its own."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(DISTRIBUTION, "missing", "not installed", "pip install -e . in the repository")
        return
    wrong = []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        if requirement.name == "torch":
            detail = f"{version or 'not installed'} (needs {requirement.specifier})"
            yield Check("torch", "ok" if fits else "missing", detail, "" if fits else f"pip install '{requirement}'")
            if fits:
                yield from check_release(str(version))
        elif not fits:
            wrong.append(str(requirement))
    if wrong:
        quoted = " ".join(f"'{requirement}'" for requirement in wrong)
        yield Check("packages", "missing", f"requirements not met: {', '.join(wrong)}", f"pip install {quoted}")
    else:
        yield Check("packages", "ok", f"{len(lines)} requirements met")


def check_release(version: str) -> Iterator[Check]:
    """Warn if torch is newer than the tested releases; it may work, and nothing prevents its installation."""
    from passes.compat.patching.torch_releases import why_untested  # which imports torch

    if why := why_untested(version):
        yield Check("release", "warning", why, "report failures; or install a tested release")


def check_solvers() -> Iterator[Check]:
    """HiGHS is required; other solvers that PuLP finds are optional."""
    if not _installed("pulp"):
        yield Check("solvers", "missing", "PuLP is not installed", "pip install 'pulp[highs]'")
        return
    import pulp

    found = pulp.listSolvers(onlyAvailable=True)
    if "HiGHS" in found:
        yield Check("HiGHS", "ok", "through PuLP")
    else:
        yield Check("HiGHS", "missing", "PuLP does not find it", "pip install 'pulp[highs]'")
    if "PULP_CBC_CMD" in found or "COIN_CMD" in found:
        yield Check("CBC", "ok", "through PuLP")
    else:
        yield Check("CBC", "warning", "PuLP does not find it", "Debian: apt-get install coinor-cbc")
    others = sorted(set(found) - {"HiGHS", "PULP_CBC_CMD", "COIN_CMD"})
    if others:
        yield Check("other solvers", "ok", ", ".join(others))


def check_backend() -> Check:
    """Check that torch.compile finds the backend by its entry point, and that its module can be imported."""
    entries = [entry for entry in importlib.metadata.entry_points(group=BACKEND_GROUP) if entry.name == "hpml"]
    if not entries:
        return Check("backend", "missing", f"no entry point hpml in the group {BACKEND_GROUP}",
                     f"pip install -e . in the repository, with {sys.executable}")
    try:
        entries[0].load()
    except Exception as error:  # of any kind: torch.compile would raise it too
        return Check("backend", "missing", f"{entries[0].value}: {type(error).__name__}: {error}",
                     f"{sys.executable} -c 'import {entries[0].module}' shows the whole error")
    return Check("backend", "ok", f"torch.compile(model, backend=\"hpml\") is {entries[0].value}")


def check_compiler() -> Check:
    """Check for a C++ compiler and Python.h, which inductor needs."""
    remedy = "Debian: apt-get install g++ python3-dev; without it only options={\"compiler\": \"eager\"} works"
    wanted = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    compiler = next((path for path in map(shutil.which, filter(None, wanted)) if path), None)
    if compiler is None:
        return Check("C++ compiler", "missing", "none found, and inductor needs one", remedy)
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return Check("C++ compiler", "missing", f"{compiler}, but Python.h is not there", remedy)
    return Check("C++ compiler", "ok", compiler)


def check_dot() -> Check:
    dot = shutil.which("dot")
    if dot is None:
        return Check("dot", "warning", "not found: no pictures of plans", "Debian: apt-get install graphviz")
    return Check("dot", "ok", dot)


def check_devices() -> Iterator[Check]:
    import torch

    memory_gib = memory_bytes() / GIB
    yield Check("CPU", "ok", f"{available_cores()} cores, {memory_gib:.1f} GiB")
    count = torch.cuda.device_count()
    if not count:
        yield Check("CUDA devices", "ok", "none: ranks run on the CPU")
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Check(f"CUDA device {index}", "ok", f"{properties.name}, {properties.total_memory / GIB:.1f} GiB")


def check_communication() -> Iterator[Check]:
    import torch
    import torch.cuda.nccl
    import torch.distributed as dist

    build = "install a torch build with torch.distributed"
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Check("gloo", "ok", "available") if gloo else Check("gloo", "missing", "not in this torch", build)
    if dist.is_available() and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "available"
        yield Check("nccl", "ok", version)
    elif torch.cuda.device_count():
        yield Check("nccl", "missing", "not in this torch, and there are CUDA devices", build)
    else:
        yield Check("nccl", "ok", "not in this torch; only CUDA devices need it")


def check_all_reduce() -> Check:
    """Run an all_reduce on two processes under torchrun, as `hpml run` starts them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "--module", SMOKE_MODULE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = child.communicate(timeout=SMOKE_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.terminate()  # not kill, so that torchrun ends its ranks
        child.communicate()
        return Check("all_reduce", "missing", f"two gloo ranks did not finish within {SMOKE_LIMIT_S} s",
                     "set GLOO_SOCKET_IFNAME to a working network interface, such as lo")
    if child.returncode != 0:
        errors = [line for line in output.splitlines() if "Error" in line or "No module" in line]
        return Check("all_reduce", "missing", errors[0] if errors else f"exit code {child.returncode}",
                     f"{' '.join(command)} shows the whole error")
    return Check("all_reduce", "ok", "two gloo ranks agree")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

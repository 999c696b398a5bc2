"""Measure energy in joules with hardware counters: RAPL for CPU packages, NVML for NVIDIA GPUs.

    with EnergyMeter() as meter:
        train()
    meter.joules, meter.label        # 512.3, "measured (RAPL)"; None, None where there is no meter

Without a driver, counters or permission to read them there is no meter, and no error is raised.
"""
from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

log = logging.getLogger("hpml")

RAPL_ROOT = Path("/sys/class/powercap")


class Counter(Protocol):
    """An energy counter."""

    label: str

    def joules(self) -> float:
        """Energy since the counter was made. Raises OSError if it cannot be read any more."""
        ...


@dataclass
class _Zone:
    """One RAPL zone: its file, the value where it wraps around, and the last reading, in µJ."""

    file: Path
    range_uj: int
    last_uj: int


class RaplCounter:
    """Energy of the CPU packages and their memory: `intel-rapl:N` and its subzone `dram` in the kernel's powercap tree.

    (AMD's processors appear under the same name.) The subzones `core` and `uncore` are part of the package, and `psys`
    contains it, so they are not counted. A counter wraps around after max_energy_range_uj, for a package in some minutes
    to an hour: call `joules` at least that often. https://docs.kernel.org/power/powercap/powercap.html
    """

    label = "measured (RAPL)"

    def __init__(self, root: Path = RAPL_ROOT):
        """Raises OSError if there is no zone, or if one cannot be read (since Linux 5.10, only root may)."""
        self._zones = [_zone(folder) for folder in sorted(root.glob("intel-rapl:*")) if _counts(folder)]
        if not self._zones:
            raise FileNotFoundError(f"no RAPL package under {root}")
        self._total_uj = 0

    def joules(self) -> float:
        for zone in self._zones:
            now_uj = _number(zone.file)
            step_uj = now_uj - zone.last_uj
            self._total_uj += step_uj if step_uj >= 0 else step_uj + zone.range_uj
            zone.last_uj = now_uj
        return self._total_uj * 1e-6


def _counts(folder: Path) -> bool:
    name = (folder / "name").read_text().strip()
    return name.startswith("package") or name == "dram"


def _zone(folder: Path) -> _Zone:
    file = folder / "energy_uj"
    return _Zone(file, _number(folder / "max_energy_range_uj"), _number(file))


def _number(file: Path) -> int:
    return int(file.read_text())


class NvmlCounter:
    """Energy of whole GPUs from NVML's total energy counter (Volta and later), in mJ since the driver was loaded.

    nvml: the module `pynvml` (package nvidia-ml-py), or a stub. gpus: indices or UUIDs (`GPU-...`); None: those of
    CUDA_VISIBLE_DEVICES, or all.
    """

    label = "measured (NVML)"

    def __init__(self, nvml: Any, gpus: Sequence[int | str] | None = None):
        """Raises OSError if there is no driver, no such GPU, or no counter."""
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            chosen = _visible(nvml) if gpus is None else gpus
            self._handles = [_handle(nvml, gpu) for gpu in chosen]
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        if not self._handles:
            raise FileNotFoundError("NVML finds no GPU")
        self._start_mj = self._now_mj()

    def joules(self) -> float:
        return (self._now_mj() - self._start_mj) * 1e-3

    def _now_mj(self) -> int:
        try:
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles)
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error


def _visible(nvml: Any) -> list[int | str]:
    """GPUs in CUDA_VISIBLE_DEVICES. CUDA's indices equal NVML's if CUDA_DEVICE_ORDER is PCI_BUS_ID or all GPUs are alike."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(range(nvml.nvmlDeviceGetCount()))
    parts = [part.strip() for part in named.split(",") if part.strip()]
    return [int(part) if part.isdigit() else part for part in parts if part != "-1"]


def _handle(nvml: Any, gpu: int | str) -> Any:
    if isinstance(gpu, int):
        return nvml.nvmlDeviceGetHandleByIndex(gpu)
    return nvml.nvmlDeviceGetHandleByUUID(gpu)


def find_counter(device: str | None = None, *, rapl_root: Path = RAPL_ROOT, nvml: Any = None,
                 gpus: Sequence[int | str] | None = None) -> Counter | None:
    """Find the energy counter of a kind of device, "cuda" (NVML) or "cpu" (RAPL); None: of the GPUs if there are any, else
    of the CPUs. Returns None if there is no counter, and logs why."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"unknown kind of device {device!r}; legal kinds: cpu, cuda")
    if device != "cpu":
        try:
            return NvmlCounter(nvml if nvml is not None else importlib.import_module("pynvml"), gpus)
        except (OSError, ImportError) as error:
            log.debug("no energy of GPUs: %s", error)
    if device != "cuda":
        try:
            return RaplCounter(rapl_root)
        except (OSError, ValueError) as error:
            log.debug("no energy of CPUs: %s", error)
    return None


class EnergyMeter:
    """Context manager that measures the energy used inside it.

    joules: of the whole device or package, including other programs on it (while inside: so far). label: how it was
    measured. Both are None if there is no counter, or if it fails.
    """

    def __init__(self, device: str | None = None, **where: Any):
        """device, where: arguments of `find_counter`, which is called on entering."""
        self._device, self._where = device, where
        self._counter: Counter | None = None
        self._joules: float | None = None
        self._label: str | None = None

    @property
    def label(self) -> str | None:
        return None if self.joules is None else self._label

    @property
    def joules(self) -> float | None:
        if self._counter is not None:
            self._read(self._counter)
        return self._joules

    def __enter__(self) -> EnergyMeter:
        self._counter = find_counter(self._device, **self._where)
        self._joules, self._label = None, self._counter.label if self._counter else None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._counter is not None:
            self._read(self._counter)
        self._counter = None

    def _read(self, counter: Counter) -> None:
        try:
            self._joules = counter.joules()
        except (OSError, ValueError) as error:
            log.warning("the energy counter stopped answering: %s", error)
            self._counter = self._joules = None

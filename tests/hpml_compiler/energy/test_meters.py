"""A folder like the kernel's, or an object like pynvml, before -> joules and their label after."""
from __future__ import annotations

from pathlib import Path

import pytest

from hpml_compiler.energy.meters import EnergyMeter, RaplCounter, find_counter

RANGE_UJ = 1_000_000_000


def zone(root: Path, folder: str, name: str, energy_uj: int) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    return path / "energy_uj"


@pytest.fixture
def package(tmp_path) -> Path:
    return zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)


class Nvml:
    """pynvml's functions that are needed; `energy_mj` by GPU, None where the GPU has no counter."""

    class NVMLError(Exception):
        pass

    def __init__(self, energy_mj, driver: bool = True):
        self.energy_mj, self.driver = dict(energy_mj), driver

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        return len(self.energy_mj)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(self.energy_mj):
            raise self.NVMLError("Invalid Argument")
        return list(self.energy_mj)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.energy_mj:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.energy_mj[handle] is None:
            raise self.NVMLError("Not Supported")
        return self.energy_mj[handle]


NO_GPU = Nvml({}, driver=False)


def test_rapl_counts_between_entering_and_leaving(tmp_path, package):
    with EnergyMeter("cpu", rapl_root=tmp_path) as meter:
        package.write_text("7500000\n")
        assert meter.joules == pytest.approx(2.5)
        package.write_text("9000000\n")
    package.write_text("99000000\n")
    assert meter.joules == pytest.approx(4.0)
    assert meter.label == "measured (RAPL)"


def test_rapl_wraps_around_and_may_do_so_twice_if_it_is_read_between(tmp_path, package):
    counter = RaplCounter(tmp_path)
    package.write_text("1000000\n")
    assert counter.joules() == pytest.approx(RANGE_UJ * 1e-6 - 4.0)
    package.write_text("3000000\n")
    assert counter.joules() == pytest.approx(RANGE_UJ * 1e-6 - 2.0)
    package.write_text("0\n")
    assert counter.joules() == pytest.approx(2 * RANGE_UJ * 1e-6 - 5.0)


def test_rapl_adds_packages_and_memory_and_nothing_twice(tmp_path, package):
    others = {
        "second": zone(tmp_path, "intel-rapl:1", "package-1", 0),
        "dram": zone(tmp_path, "intel-rapl:0:1", "dram", 0),
        "core": zone(tmp_path, "intel-rapl:0:0", "core", 0),
        "psys": zone(tmp_path, "intel-rapl:2", "psys", 0),
    }
    counter = RaplCounter(tmp_path)
    package.write_text("6000000\n")
    for file, uj in zip(others.values(), (2_000_000, 4_000_000, 500_000, 9_000_000)):
        file.write_text(str(uj))
    assert counter.joules() == pytest.approx(1.0 + 2.0 + 4.0)


def test_no_zone_and_no_right_to_read_one_are_no_meter(tmp_path):
    with EnergyMeter("cpu", rapl_root=tmp_path / "nowhere") as meter:
        pass
    assert meter.joules is None and meter.label is None
    path = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    path.unlink()
    path.mkdir()  # reading it raises OSError for everyone, where a mode of 0o400 does not for root
    assert find_counter("cpu", rapl_root=tmp_path) is None


def test_a_counter_that_stops_answering_leaves_no_figure(tmp_path, package, caplog):
    with EnergyMeter("cpu", rapl_root=tmp_path) as meter:
        package.unlink()
    assert meter.joules is None and meter.label is None
    assert "stopped answering" in caplog.text


def test_nvml_adds_the_gpus_that_are_chosen(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = Nvml({"GPU-a": 1000, "GPU-b": 5000})
    with EnergyMeter("cuda", nvml=nvml) as both, EnergyMeter("cuda", nvml=nvml, gpus=[1]) as one:
        nvml.energy_mj = {"GPU-a": 3000, "GPU-b": 5500}
    assert both.joules == pytest.approx(2.5) and one.joules == pytest.approx(0.5)
    assert both.label == one.label == "measured (NVML)"


@pytest.mark.parametrize(("visible", "joules"), [("0", 2.0), ("1", 0.5), ("GPU-b", 0.5), ("1,0", 2.5), ("", None), ("-1", None),
                                                 ("7", None)])
def test_nvml_counts_the_visible_gpus(monkeypatch, visible, joules):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml({"GPU-a": 1000, "GPU-b": 5000})
    with EnergyMeter("cuda", nvml=nvml) as meter:
        nvml.energy_mj = {"GPU-a": 3000, "GPU-b": 5500}
    assert meter.joules == (None if joules is None else pytest.approx(joules))


@pytest.mark.parametrize("nvml", [NO_GPU, Nvml({}), Nvml({"GPU-a": None})], ids=["driver", "none", "counter"])
def test_without_gpus_the_cpus_are_measured_unless_gpus_were_asked_for(tmp_path, package, nvml, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_counter("cuda", nvml=nvml, rapl_root=tmp_path) is None
    with EnergyMeter(nvml=nvml, rapl_root=tmp_path) as meter:
        package.write_text("6000000\n")
    assert (meter.joules, meter.label) == (pytest.approx(1.0), "measured (RAPL)")


def test_a_meter_can_be_used_again_and_lets_errors_through(tmp_path, package):
    meter = EnergyMeter("cpu", rapl_root=tmp_path)
    with pytest.raises(KeyError), meter:
        raise KeyError
    with meter:
        package.write_text("6000000\n")
    assert meter.joules == pytest.approx(1.0)


def test_this_machine_has_a_meter_or_none_without_an_error():
    with EnergyMeter() as meter:
        sum(range(10_000))
    assert (meter.joules is None) == (meter.label is None)
    with pytest.raises(ValueError, match="cpu, cuda"):
        find_counter("tpu")

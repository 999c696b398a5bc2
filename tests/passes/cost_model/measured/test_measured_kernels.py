"""Measurements and a roofline before -> prices after."""
from __future__ import annotations

import pytest

from passes.cost_model import RooflineCost
from passes.cost_model.measured.measured_kernels import FACTOR, OPERATION, OVERHEAD, DeviceMeasurements, MeasuredCost
from passes.cost_model.measured.measurement_cache import MeasurementCache, TimedMeasurement
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin


@pytest.fixture
def roofline() -> RooflineCost:
    mesh = mesh_from_pin({}, Cluster.parse("1x1:cpu"))
    return RooflineCost(mesh.device, mesh)


def test_without_measurements_it_is_the_roofline(roofline):
    cost = MeasuredCost(roofline, DeviceMeasurements())
    for kind in ("matmul", "pointwise", "view"):
        assert cost.compute_us(1e9, 1e6, "float32", kind, "some key") == roofline.compute_us(1e9, 1e6, "float32", kind)
    assert cost.optimizer_us(1e6) == roofline.optimizer_us(1e6)
    axis = mesh_from_pin({"x": 2}, Cluster.parse("1x2:cpu")).axes[0]
    assert cost.collective_us("all_reduce", axis, 1e6) == roofline.collective_us("all_reduce", axis, 1e6)


def test_a_measured_operation_costs_its_median_and_its_call(roofline):
    cost = MeasuredCost(roofline, DeviceMeasurements({"mm": 70.0}, launch_us=2.5))
    assert cost.compute_us(1e9, 1e6, "float32", "matmul", "mm") == 72.5


def test_others_are_scaled_as_those_of_their_kind_were(roofline):
    launch = roofline.device.launch_latency_us
    body = roofline.compute_us(0.0, 1e6, "float32", "pointwise") - launch
    cost = MeasuredCost(roofline, DeviceMeasurements(factors={"pointwise": 3.0}, launch_us=1.0))
    assert cost.compute_us(0.0, 1e6, "float32", "pointwise") == pytest.approx(1.0 + 3.0 * body)
    without = MeasuredCost(roofline, DeviceMeasurements(factors={"pointwise": 3.0}))
    assert without.compute_us(0.0, 1e6, "float32", "pointwise") == pytest.approx(launch + 3.0 * body)


def test_the_optimizer_pays_per_parameter_and_per_element(roofline):
    cost = MeasuredCost(roofline, DeviceMeasurements(factors={"optimizer": 2.0}, tensor_us=50.0))
    assert cost.optimizer_us(1e6) == pytest.approx(50.0 + 2.0 * roofline.optimizer_us(1e6))
    assert cost.optimizer_us(0.0) == 0.0


def test_a_collective_in_a_step_takes_what_was_found_besides():
    class Curves:
        def is_measured(self, kind: str) -> bool:
            return kind == "all_reduce"

        def collective_us(self, kind: str, axis: object, nbytes: float) -> float:
            return 500.0 if nbytes else 0.0

    mesh = mesh_from_pin({"x": 2}, Cluster.parse("1x2:cpu"))
    roofline = RooflineCost(mesh.device, mesh)
    cost = MeasuredCost(roofline, DeviceMeasurements(collective_us=250.0), Curves())  # type: ignore[arg-type]
    axis = mesh.axes[0]
    assert cost.collective_us("all_reduce", axis, 1e6) == 750.0 and cost.collective_us("all_reduce", axis, 0.0) == 0.0
    assert cost.collective_us("broadcast", axis, 1e6) == roofline.collective_us("broadcast", axis, 1e6)


def test_what_was_found_on_the_graph_itself_goes_before_the_median_of_others(tmp_path):
    with MeasurementCache(tmp_path / "m.sqlite") as cache:
        assert DeviceMeasurements.load(cache, "here") is None
        cache.put("here", OPERATION, "mm", TimedMeasurement(7.0, 3))
        cache.put_all("here", FACTOR, {f"pointwise@{g}": TimedMeasurement(v, 1) for g,
                                       v in (("a", 1.0), ("b", 2.0), ("c", 9.0))})
        cache.put_all("here", OVERHEAD, {"launch@a": TimedMeasurement(4.0, 1), "tensor@b": TimedMeasurement(30.0, 1)})
        known, unknown = DeviceMeasurements.load(cache, "here", "a"), DeviceMeasurements.load(cache, "here", "z")
        elsewhere = DeviceMeasurements.load(cache, "there")
    assert known == DeviceMeasurements({"mm": 7.0}, {"pointwise": 1.0}, 4.0, 0.0, 30.0)
    assert unknown == DeviceMeasurements({"mm": 7.0}, {"pointwise": 2.0}, 4.0, 0.0, 30.0)
    assert elsewhere is None

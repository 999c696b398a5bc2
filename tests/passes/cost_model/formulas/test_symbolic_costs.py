"""Expressions against the numbers of the cost model, over sizes that nothing was fitted to."""
from __future__ import annotations

import pytest
import sympy

from passes.cost_model import COLLECTIVE_KINDS, RooflineCost, collective_us
from passes.cost_model.formulas.symbolic_costs import SymbolicCosts, collective_expression, largest, symbolic_axes
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin

N, M, B = sympy.symbols("n m b", real=True)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("nbytes", [1, 4096, 10**8])
def test_a_collective_is_that_of_the_cost_model_for_any_number_of_devices(kind, size, nbytes):
    now = mesh_from_pin({"n": 4}, Cluster.parse("1x4:h100-80g"))
    then = mesh_from_pin({"n": size}, Cluster.parse(f"1x{size}:h100-80g"))
    (axis,) = symbolic_axes(now, [N], 4)
    found = collective_expression(kind, axis, B).subs({N: size, B: nbytes})
    assert float(found) == pytest.approx(collective_us(kind, then.axes[0], nbytes))


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_across_nodes_too(kind, nodes):
    now = mesh_from_pin({"n": 32, "m": 2}, Cluster.parse("8x8:a100-80g"))
    then = mesh_from_pin({"n": 4 * nodes, "m": 2}, Cluster.parse(f"{nodes}x8:a100-80g"))
    axis = symbolic_axes(now, [N, M], 8)[0]
    for nbytes in (1, 10**5, 10**9):
        found = collective_expression(kind, axis, B).subs({N: 4 * nodes, M: 2, B: nbytes})
        assert float(found) == pytest.approx(collective_us(kind, then.axes[0], nbytes))


@pytest.mark.parametrize("device", ["cpu", "h100-80g"])
@pytest.mark.parametrize("kind", ["matmul", "attention", "pointwise", "view"])
@pytest.mark.parametrize("size", [1, 100, 10**4, 10**6])
def test_a_kernel_is_that_of_the_cost_model_at_any_size(device, kind, size):
    mesh = mesh_from_pin({"n": 2}, Cluster.parse(f"1x2:{device}"))
    roofline = RooflineCost(mesh.device, mesh)
    costs = SymbolicCosts(roofline, symbolic_axes(mesh, [N], 2), {N: 2, B: 8})
    found = costs.compute_us(B * 10**6 / N, B * 1000, "float32", kind).subs({N: 2, B: size})
    assert float(found) == pytest.approx(roofline.compute_us(size * 5e5, size * 1e3, "float32", kind))


def test_a_measured_term_is_what_was_measured_at_the_base_and_scales_from_there():
    mesh = mesh_from_pin({"n": 2}, Cluster.parse("1x2:cpu"))
    costs = SymbolicCosts(RooflineCost(mesh.device, mesh), symbolic_axes(mesh, [N], 2), {N: 2, B: 8})
    scaled = costs.scaled(5 * B, 60.0)
    assert float(scaled.subs({B: 8})) == pytest.approx(60.0)
    assert float(scaled.subs({B: 16})) == pytest.approx(120.0)


def test_max_keeps_only_what_can_be_the_larger():
    assert largest(3 * B + 1, 2 * B) == 3 * B + 1
    assert largest(B, 2 * B * N) == sympy.Max(B, 2 * B * N, evaluate=False)  # which is larger is not seen term by term
    assert largest(B, 2 * B + N) == 2 * B + N

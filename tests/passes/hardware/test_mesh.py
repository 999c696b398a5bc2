from __future__ import annotations

import pickle
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import (
    BETWEEN,
    BOTH,
    INSIDE,
    Mesh,
    MeshAxis,
    enumerate_meshes,
    factorizations,
    links_of_axes,
    mesh_from_pin,
)
from passes.json_records import from_json, to_json


def test_enumerate_four_ranks():
    meshes = enumerate_meshes(Cluster.parse("1x4:cpu"))
    assert [m.shape for m in meshes] == [(4,), (2, 2)]
    assert meshes[1].names == ("x", "y") and meshes[1].size == 4


def test_enumerate_sixty_four_ranks():
    cluster = Cluster.parse("8x8:h100-80g")
    shapes = [m.shape for m in enumerate_meshes(cluster)]
    assert shapes == [(64,), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2)]
    assert [m.shape for m in enumerate_meshes(cluster, max_axes=1)] == [(64,)]
    assert (4, 4, 4) in [m.shape for m in enumerate_meshes(cluster, max_axes=3)]
    with pytest.raises(BadInput, match="max_axes"):
        enumerate_meshes(cluster, max_axes=0)


def test_world_of_one_has_a_mesh_without_axes():
    [mesh] = enumerate_meshes(Cluster.parse("1x1:cpu"))
    assert (mesh.axes, mesh.shape, mesh.size, mesh.coordinates(0), str(mesh)) == ((), (), 1, (), "one device")
    assert mesh_from_pin({}, Cluster.parse("1x1:cpu")) == mesh
    assert mesh_from_pin({"dp": 1}, Cluster.parse("1x1:cpu")).shape == (1,)


@given(st.integers(1, 400), st.integers(1, 4))
def test_factorizations_are_all_and_distinct(number, count):
    found = list(factorizations(number, count))
    assert len(set(found)) == len(found)
    assert all(len(f) == count and prod(f) == number and min(f) > 1 for f in found)
    if count == 2:
        assert len(found) == sum(number % d == 0 for d in range(2, number))


def test_ranks_are_row_major():
    mesh = mesh_from_pin({"dp": 2, "tp": 4}, Cluster.parse("1x8:a100-80g"))
    assert [mesh.coordinates(r) for r in (0, 1, 3, 4, 7)] == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 3)]
    assert all(mesh.rank(mesh.coordinates(r)) == r for r in range(8))
    assert mesh.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert str(mesh) == "dp=2 x tp=4" and mesh.axis("tp").size == 4
    for bad in (lambda: mesh.coordinates(8), lambda: mesh.rank((0, 4)), lambda: mesh.rank((0,))):
        with pytest.raises(IndexError):
            bad()
    with pytest.raises(KeyError, match="dp, tp"):
        mesh.axis("pp")


# 8 nodes of 8 V100: NVLink 120 GB/s per device; one NIC of 11.25 GB/s for two devices, so 5.625 for each.
@pytest.mark.parametrize(
    ("shape", "bandwidths"),
    [
        ((8, 8), (5.625e9, 120e9)),  # one member per node: all 8 devices of a node use the 4 NICs
        ((4, 16), (5.625e9, 45e9)),  # y has whole nodes: all 4 NICs carry its ring
        ((16, 4), (11.25e9, 120e9)),  # x has 2 members per node: their 2 shares
        ((64,), (45e9,)),
    ],
)
def test_axes_are_priced_where_they_lie(shape, bandwidths):
    [mesh] = [m for m in enumerate_meshes(Cluster.parse("8x8:v100-32g")) if m.shape == shape]
    assert tuple(a.bandwidth_bytes_per_s for a in mesh.axes) == pytest.approx(bandwidths)


def test_levels_of_an_axis_that_spans_nodes():
    cluster = Cluster.parse("8x8:v100-32g")
    axis = enumerate_meshes(cluster)[0].axes[0]
    inner, outer = axis.levels
    assert (inner.size, inner.bandwidth_bytes_per_s) == (8, pytest.approx(120e9))
    assert (outer.size, outer.bandwidth_bytes_per_s) == (8, pytest.approx(5.625e9))
    intra, inter = cluster.intra_node.latency_us, cluster.inter_node.latency_us
    assert axis.latency_us == pytest.approx((8 * inter + 56 * intra) / 64)
    inside = mesh_from_pin({"dp": 8, "tp": 8}, cluster).axis("tp")
    assert (inside.levels, inside.latency_us) == ((), intra)


def test_groups_that_do_not_fit_nodes_cross_at_every_hop():
    mesh = mesh_from_pin({"a": 3, "b": 4}, Cluster.parse("2x6:a100-80g"))  # b: ranks 4..7 lie in two nodes
    assert mesh.axis("b").latency_us == 4.0 and not mesh.axis("b").levels
    assert mesh.axis("b").bandwidth_bytes_per_s < 25e9


@given(st.sampled_from(["8x8:h100-80g", "4x8:v100-32g", "2x4:l4-24g", "3x4:cpu"]), st.integers(1, 3))
def test_node_by_node_check_of_where_axes_lie(text, max_axes):
    """Levels agree with counting, for every group, its members on each node."""
    cluster = Cluster.parse(text)
    for mesh in enumerate_meshes(cluster, max_axes):
        for axis in mesh.axes:
            per_group = [[r // cluster.devices_per_node for r in group] for group in mesh.groups(axis.name)]
            nodes = max(len(set(group)) for group in per_group)
            members = {group.count(n) for group in per_group for n in group}
            if axis.levels:
                assert members == {axis.levels[0].size} and nodes == axis.levels[1].size > 1
            elif nodes == 1:
                assert axis.latency_us == cluster.intra_node.latency_us
            else:
                assert axis.latency_us == cluster.inter_node.latency_us


def test_pin_that_does_not_multiply_says_both_numbers_and_what_would():
    with pytest.raises(BadInput) as error:
        mesh_from_pin({"dp": 2, "tp": 3}, Cluster.parse("1x8:cpu"))
    assert "dp=2 x tp=3 has 6 devices, the world has 8" in error.value.what
    assert "2 x 4, 4 x 2" in error.value.next_step
    with pytest.raises(BadInput) as error:
        mesh_from_pin({"dp": 2, "tp": 2}, Cluster.parse("1x7:cpu"))
    assert "multiply to 7: 7 (" in error.value.next_step


@pytest.mark.parametrize("pin", [{"dp": 0, "tp": 4}, {"dp": 4.0}, {"dp": True, "tp": 4}, {"": 4}, {"d p": 4}])
def test_pin_refuses_what_is_no_axis(pin):
    with pytest.raises(BadInput, match="axis"):
        mesh_from_pin(pin, Cluster.parse("1x4:cpu"))


def test_pin_keeps_names_order_and_axes_of_one():
    mesh = mesh_from_pin({"tp": 4, "pp": 1, "dp": 2}, Cluster.parse("1x8:cpu"))
    assert (mesh.names, mesh.shape) == (("tp", "pp", "dp"), (4, 1, 2))
    assert pickle.loads(pickle.dumps(mesh)) == mesh and hash(mesh) == hash(pickle.loads(pickle.dumps(mesh)))


def test_mesh_as_json():
    mesh = enumerate_meshes(Cluster.parse("4x8:v100-32g"))[0]
    assert from_json(Mesh, to_json(mesh), "plan") == mesh


def test_mixed_cluster_is_refused():
    mixed = Cluster(Cluster.parse("1x2:cpu").groups + Cluster.parse("1x2:l4-24g").groups)
    with pytest.raises(BadInput, match="2 groups"):
        enumerate_meshes(mixed)


def test_axis_refuses_levels_that_do_not_multiply():
    axis = enumerate_meshes(Cluster.parse("2x2:cpu"))[0].axes[0]
    with pytest.raises(BadInput, match="levels"):
        MeshAxis("x", 8, 1.0, 1.0, axis.levels)
    with pytest.raises(BadInput, match="positive"):
        MeshAxis("x", 8, 1.0, 0.0)


@pytest.mark.parametrize(("shape", "links"), [
    ({"dp": 32, "tp": 8}, {"dp": BETWEEN, "tp": INSIDE}), ({"tp": 8, "dp": 32}, {"tp": BETWEEN, "dp": BOTH}),
    ({"dp": 16, "tp": 16}, {"dp": BETWEEN, "tp": BOTH}), ({"pp": 1, "dp": 64, "tp": 4}, {"dp": BOTH, "tp": INSIDE})])
def test_links_are_those_that_are_priced(shape, links):
    assert links_of_axes(shape, 8) == links
    cluster = Cluster.parse("32x8:a100-80g")
    for axis in mesh_from_pin(shape, cluster).axes:
        if axis.size > 1:
            inside, both = axis.latency_us == cluster.intra_node.latency_us, bool(axis.levels)
            assert links[axis.name] == (BOTH if both else INSIDE if inside else BETWEEN)

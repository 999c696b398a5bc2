"""Which device has which part: the same as DTensor's placements say."""
from __future__ import annotations

import itertools
import xml.etree.ElementTree

import pytest

from hpml_compiler.visualize.description.device_grid import device_grid, ranges
from hpml_compiler.visualize.grid_views import grid_lines, grid_svg


@pytest.mark.parametrize("placements", itertools.product(["R", "S(0)", "S(1)", "P"], repeat=2))
def test_every_device_has_the_part_that_its_coordinates_say(placements):
    mesh = {"dp": 2, "tp": 4}
    grid = device_grid(placements, mesh)
    assert sorted(device for own in grid.parts.values() for device in own) == list(range(8))
    for device, (dp, tp) in enumerate(itertools.product(range(2), range(4))):
        expected = []
        for dim in (0, 1):
            ways = [(n, size) for place, n, size in zip(placements, (dp, tp), (2, 4)) if place == f"S({dim})"]
            if ways:
                index = 0
                for n, size in ways:
                    index = index * size + n
                expected.append(index)
        assert device in grid.parts[tuple(expected)]
    assert grid.partial == ("P" in placements)


def test_grid_as_text_and_picture():
    grid = device_grid(["R", "S(0)"], {"dp": 2, "tp": 4})
    lines = list(grid_lines(grid, "256 columns, 64 rows"))
    assert lines[1] == "part 2 of 4 of columns: devices 1, 5" and len(lines) == 4
    assert list(grid_lines(device_grid(["R"], {"dp": 4}), "")) == ["devices 0-3 have all of it"]
    drawn = grid_svg("a<b>&", grid, "256 columns, 64 rows")
    assert "columns in 4 parts over tp; 2 copies of each part" in drawn and "a&lt;b&gt;" in drawn
    xml.etree.ElementTree.fromstring(drawn)


def test_large_grids_are_shortened():
    grid = device_grid(["S(0)", "S(1)"], {"dp": 64, "tp": 16})
    assert list(grid_lines(grid, ""))[-1] == "and 1016 more parts" and "and 960 more parts" in grid_svg("w", grid, "")
    assert ranges([0, 1, 2, 3]) == "0-3" and ranges(range(0, 64, 8)) == "0, 8, 16, ... (8 devices)"

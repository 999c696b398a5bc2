"""Groups with many strategies on each axis before -> few choices after, and the cheapest plan among them."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.hardware.axis import device_axes
from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.sharding.strategies import mesh_strategies
from passes.solver.solvers import SolverOptions
from tests.passes.graphs import Prices
from tests.passes.traced import annotated_joint


class Up(nn.Module):
    """Backward of upsampling, normalization and an activation is one group of many operations."""

    def __init__(self, channels: int = 4):
        super().__init__()
        self.before, self.norm = nn.Conv2d(4, channels, 3, padding=1), nn.GroupNorm(2, channels)
        self.after = nn.Conv2d(channels + 4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(F.relu(self.norm(self.before(x))), scale_factor=2)
        return self.after(torch.cat([y, F.interpolate(x, scale_factor=2)], 1)).square().mean()


def placed(graph, axes) -> MeshPlacement:
    answer = solve_on_mesh(graph, device_axes(axes), Prices(us_per_flop=10.0), options=SolverOptions(gap=0.0))
    assert isinstance(answer, MeshPlacement)
    return answer


@pytest.mark.parametrize("axes", [{"x": 4}, {"x": 2, "y": 2}])
def test_what_others_replace_is_not_needed_for_the_cheapest_plan(axes, monkeypatch):
    graph = annotated_joint(Up(), torch.randn(4, 4, 4, 4)).graph
    monkeypatch.setattr(mesh_strategies, "MOST_COMBINED", 10**9)
    all_of_them = placed(graph, axes)
    monkeypatch.setattr(mesh_strategies, "MOST_COMBINED", 8)
    few = placed(graph, axes)
    assert few.cost.step == pytest.approx(all_of_them.cost.step, rel=1e-9)

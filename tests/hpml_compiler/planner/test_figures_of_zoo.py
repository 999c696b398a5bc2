"""Models of many families on meshes of several kinds -> plans whose figures agree with each other."""
from __future__ import annotations

import pytest

from tests.helpers.zoo_plans import CASES, zoo_plan
from tests.hpml_compiler.planner.figures import check_figures


@pytest.mark.parametrize("name", CASES)
def test_figures_of_a_plan_agree(name):
    check_figures(zoo_plan(name))

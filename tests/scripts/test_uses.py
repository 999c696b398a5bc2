"""Every use of torch in `tests/scripts/uses` -> one device's result, or the words with which it is refused.

Here each use runs on one of the meshes; `python -m tests.scripts` runs all of them on all.
"""
from __future__ import annotations

import pytest

from tests.scripts.launch import outcomes
from tests.scripts.use import in_turn
from tests.scripts.verdict import complaint

CASES = {f"{use.name}-{mesh}": (use, mesh) for use, mesh in in_turn()}


@pytest.fixture(scope="module")
def outcome_of(request, tmp_path_factory):
    """Case -> outcome; the first that is asked for runs all selected ones of its family."""
    selected = [CASES[item.callspec.params["case"]] for item in request.session.items
                if item.path == request.path and hasattr(item, "callspec")]
    found = {}

    def outcome(use, mesh):
        if (use.name, mesh) not in found:
            together = [(other.name, its) for other, its in selected if other.family == use.family]
            found.update(outcomes(tmp_path_factory.mktemp("uses"), together))
        return found[use.name, mesh]

    return outcome


@pytest.mark.timeout(600)  # of a family, not of a use
@pytest.mark.parametrize("case", CASES)
def test_use(case, outcome_of):
    use, mesh = CASES[case]
    wrong = complaint(use, mesh, outcome_of(use, mesh))
    assert wrong is None, wrong


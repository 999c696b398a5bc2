"""Errors for the user: their text, and that they survive pickling between processes."""
from __future__ import annotations

import pickle

import pytest

from passes.errors import BadInput, HpmlError, Infeasible, MissingDependency


def test_message_says_what_where_and_next_step():
    error = BadInput("the mesh has 8 devices, the world 4", where="options['mesh']", next_step="use dp * tp = 4")
    assert str(error).splitlines() == [
        "the mesh has 8 devices, the world 4", "  where: options['mesh']", "  next step: use dp * tp = 4"]


def test_empty_fields_are_left_out():
    assert str(HpmlError("gone")) == "gone"


@pytest.mark.parametrize(("kind", "exit_code"), [(BadInput, 2), (Infeasible, 3), (MissingDependency, 4)])
def test_pickling_keeps_kind_and_fields(kind, exit_code):
    error = pickle.loads(pickle.dumps(kind("a", where="b", next_step="c")))
    assert (type(error), error.what, error.where, error.next_step) == (kind, "a", "b", "c")
    assert error.exit_code == exit_code


def test_every_error_says_where_and_what_to_do():
    """Each place that raises one gives all three texts."""
    import ast
    from pathlib import Path

    names = {"HpmlError", "BadInput", "Infeasible", "MissingDependency", "PlanMismatch"}
    root, short = Path(__file__).parents[2], []
    for path in [*(root / "passes").rglob("*.py"), *(root / "hpml_compiler").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in names:
                given = {keyword.arg for keyword in node.keywords}
                if len(node.args) < 3 and not any(isinstance(each, ast.Starred) for each in node.args) \
                        and None not in given and not (len(node.args) + len(given) >= 3 and "next_step" in given):
                    short.append(f"{path.relative_to(root)}, line {node.lineno}")
    assert not short

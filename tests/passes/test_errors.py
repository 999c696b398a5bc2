"""Errors for the user: what they print, and that they cross process borders whole."""
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

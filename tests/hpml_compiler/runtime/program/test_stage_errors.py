"""An error of a stage -> on every rank, an error that a script's `except` takes for the same."""
from __future__ import annotations

import json
import pickle
import sys

import pytest
import torch

from hpml_compiler.runtime.program.stage_errors import StageError, carried, stage_error
from passes.errors import BadInput, HpmlError


class Odd(RuntimeError):
    """With a constructor that takes other arguments than `args`, and keeps some for itself."""

    def __init__(self, code: int, *, hint: str):
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


class Strict(Odd):
    def __new__(cls, code: int, *, hint: str):
        return super().__new__(cls, code)

    def __str__(self) -> str:
        return f"strict: {self.hint}"


class Slotted(KeyError):
    __slots__ = ("key",)

    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


class Reports(Exception):
    """Uses names of ours."""

    def __init__(self):
        super().__init__()
        self.rank, self.what = 7, "its own"

    @property
    def where(self):
        raise AssertionError


class Final(ValueError):
    def __init_subclass__(cls, **_):
        raise TypeError("no subclasses")


class Unpicklable(ValueError):
    def __init__(self):
        super().__init__("cannot be sent", lambda: None)
        self.open = open(__file__)  # noqa: SIM115
        self.open.close()


def _raised(call):
    with pytest.raises(Exception) as info:
        call()
    return info.value


ERRORS = [
    IndexError("index 16 is out of bounds"), KeyError("lm_head"), torch.OutOfMemoryError("CUDA out of memory"),
    ZeroDivisionError(), StopIteration(3), AssertionError(torch.ones(2)), FileNotFoundError(2, "No such file", "weights.pt"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), ImportError("no triton", name="triton", path="/x"),
    BadInput("what", "where", "next"), HpmlError("what", "where", "next"),
    Odd(3, hint="less"), Strict(3, hint="less"), Slotted("a key"), Reports(), Final("last"), Unpicklable(),
    _raised(lambda: json.loads("{")), _raised(lambda: torch.ones(2) @ torch.ones(3)), _raised(lambda: object().missing),
    *([ExceptionGroup("two", [ValueError(1), TypeError(2)])] if sys.version_info >= (3, 11) else []),  # noqa: F821
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_is_of_the_class_that_was_raised_on_every_rank(error):
    sent = pickle.loads(pickle.dumps(carried(error)))
    for found in (stage_error(each, 1, 2, 3, "rank 1: forward failed", "rank 0", "look at rank 1") for each in (error, sent)):
        expected = ValueError if isinstance(error, Final) else type(error)
        assert isinstance(found, expected) and isinstance(found, StageError) and type(found).__name__ == expected.__name__
        assert str(found) == "rank 1: forward failed\n  where: rank 0\n  next step: look at rank 1"
        assert (found.stage, found.microbatch, found.rank) == (2, 3, getattr(error, "rank", 1))
        if not isinstance(error, Unpicklable):
            assert str(found.args) == str(error.args)
            for name in ("code", "hint", "errno", "filename", "encoding", "start", "name", "path", "value", "exceptions", "key",
                         "msg", "lineno", "pos"):
                assert str(getattr(found, name, None)) == str(getattr(error, name, None)), name
            again = pickle.loads(pickle.dumps(found))
            assert type(again) is type(found) and str(again) == str(found) and str(again.args) == str(error.args)
    assert isinstance(found, ValueError) or not isinstance(error, Unpicklable)


def test_of_a_class_that_the_other_rank_does_not_have_the_closest_base_is_raised():
    class Local(IndexError):
        pass

    found = stage_error(pickle.loads(pickle.dumps(carried(Local("here alone")))), 1, 0, 0, "what", "where", "next")
    assert isinstance(found, IndexError) and found.args == ("here alone",)
    assert isinstance(stage_error(Local("here alone"), 0, 0, 0, "what", "where", "next"), Local)


def test_what_is_large_stays_where_it_was_raised():
    error = ValueError("large", torch.zeros(1 << 20))
    error.more = torch.zeros(1 << 20)
    assert len(pickle.dumps(carried(error))) < 10_000
    found = stage_error(carried(error), 1, 0, 0, "what", "where", "next")
    assert isinstance(found, ValueError) and not hasattr(found, "more") and len(found.args) == 1

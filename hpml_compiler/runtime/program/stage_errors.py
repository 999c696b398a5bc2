"""Raise an error of one pipeline stage on every rank, as an instance of the class that the stage raised.

So `except IndexError` or `except torch.OutOfMemoryError` in a script works on every rank as it does on one device. The class is
derived from the error's own and from `StageError`; no constructor of a user's class is called. Where another rank does not have
the class, for instance one defined inside a function, the error there is an instance of its closest base class that it has.
"""
from __future__ import annotations

import contextlib
import functools
import pickle
import types
from dataclasses import dataclass
from typing import Any

from passes.errors import HpmlError

MOST_BYTES = 1 << 20
"""Limit for each pickled part of an error: larger parts stay on the rank where it was raised."""


class StageError(HpmlError):
    """An error in a stage. rank: where it was raised; stage, microbatch: the computation, None before the first microbatch.
    `args` and other attributes are those of the original error."""

    what = where = next_step = ""
    rank: int = -1
    stage: int | None = None
    microbatch: int | None = None

    def __reduce__(self) -> Any:
        original = next((base for base in type(self).__bases__ if base is not StageError), HpmlError)
        return _made, (original, self.args, vars(self), _members(self))


@dataclass(frozen=True)
class PickledError:
    """Parts of an error to send to other ranks: each pickled, as far as that is possible."""

    classes: tuple[bytes, ...]
    args: bytes | None
    attributes: tuple[tuple[str, bytes], ...]
    members: tuple[tuple[str, bytes], ...]
    text: str


def carried(error: Exception) -> PickledError:
    classes = (_pickled(base) for base in type(error).__mro__ if issubclass(base, Exception))
    return PickledError(tuple(found for found in classes if found), _pickled(error.args), _each(vars(error)),
                        _each(_members(error)),
                        str(error))


def stage_error(error: Exception | PickledError, rank: int, stage: int | None, microbatch: int | None, what: str, where: str,
                next_step: str) -> StageError:
    """error: one that was raised here, or the parts of one that another rank has sent."""
    if isinstance(error, PickledError):
        classes = [found for found in map(_unpickled, error.classes) if isinstance(found, type)]
        args = _unpickled(error.args)
        args = args if isinstance(args, tuple) else (error.text,)
        attributes, members = ({name: _unpickled(value) for name, value in each} for each in (error.attributes, error.members))
    else:
        classes = [base for base in type(error).__mro__ if issubclass(base, Exception)]
        args, attributes, members = error.args, dict(vars(error)), _members(error)
    told = {"rank": rank, "stage": stage, "microbatch": microbatch, **attributes,
            "what": what, "where": where, "next_step": next_step}
    for original in classes:
        # A class may refuse to be derived from or instantiated: then its base class is tried.
        with contextlib.suppress(Exception):
            return _made(original, args, told, members)
    return _made(Exception, args, told, members)


def _made(original: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any], members: dict[str, Any]) -> StageError:
    own = _class_of(original)
    base = next(each for each in own.__mro__ if "__new__" in vars(each) and not isinstance(vars(each)["__new__"], staticmethod))
    error = base.__new__(own, *args)
    error.args = args
    for name, value in members.items():
        with contextlib.suppress(AttributeError, TypeError):  # read-only members were set from `args`
            setattr(error, name, value)
    vars(error).update(attributes)
    return error


@functools.cache
def _class_of(original: type[Exception]) -> type[StageError]:
    """A subclass of the original with its name, for scripts that print or compare it."""
    bases = (StageError, original) if not issubclass(StageError, original) else (StageError,)
    return types.new_class(original.__name__, bases, {}, lambda body: body.update(__module__=original.__module__))


def _members(error: Exception) -> dict[str, Any]:
    """Members that C classes store outside of `__dict__`, such as OSError's errno."""
    found: dict[str, Any] = {}
    for base in type(error).__mro__:
        for name, what in vars(base).items():
            if isinstance(what, types.MemberDescriptorType | types.GetSetDescriptorType) and not name.startswith("__") \
                    and base is not BaseException:
                with contextlib.suppress(AttributeError):  # not set yet
                    found.setdefault(name, getattr(error, name))
    return found


def _each(values: dict[str, Any]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, found) for name, value in values.items() if (found := _pickled(value)) is not None)


def _pickled(value: Any) -> bytes | None:
    try:
        found = pickle.dumps(value)
    except Exception:  # a user's __reduce__ may raise anything
        return None
    return found if len(found) <= MOST_BYTES else None


def _unpickled(value: bytes | None) -> Any:
    """The value; None where this rank does not have its class, or the class does not accept it."""
    try:
        return None if value is None else pickle.loads(value)
    except Exception:
        return None

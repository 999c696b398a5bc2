"""An error of one stage of a pipeline, raised on every rank as an instance of the class that the stage raised.

So `except IndexError` or `except torch.OutOfMemoryError` in a script does on every rank what it does on one device. The class
is derived from the error's own and from `StageError`; no constructor of a user is called. Where another rank does not have the
class, as one that is defined inside a function, the error there is an instance of the closest base that it has.
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
"""Limit of each part of an error: what is larger stays on the rank where it was raised."""


class StageError(HpmlError):
    """An error in a stage. rank: where it was raised; stage, microbatch: what was computed, None before the first microbatch.
    `args` and other attributes are those of the error that was raised."""

    what = where = next_step = ""
    rank: int = -1
    stage: int | None = None
    microbatch: int | None = None

    def __reduce__(self) -> Any:
        original = next((base for base in type(self).__bases__ if base is not StageError), HpmlError)
        return _made, (original, self.args, vars(self), _members(self))


@dataclass(frozen=True)
class PickledError:
    """Parts of an error that other ranks are sent: each pickled, as far as that is possible."""

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
    """error: the one that was raised here, or what another rank has sent of its own."""
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
        # A class may refuse to be derived from, or its objects to be made: then it is the next one's.
        with contextlib.suppress(Exception):
            return _made(original, args, told, members)
    return _made(Exception, args, told, members)


def _made(original: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any], members: dict[str, Any]) -> StageError:
    own = _class_of(original)
    base = next(each for each in own.__mro__ if "__new__" in vars(each) and not isinstance(vars(each)["__new__"], staticmethod))
    error = base.__new__(own, *args)
    error.args = args
    for name, value in members.items():
        with contextlib.suppress(AttributeError, TypeError):  # what cannot be set was made from `args`
            setattr(error, name, value)
    vars(error).update(attributes)
    return error


@functools.cache
def _class_of(original: type[Exception]) -> type[StageError]:
    """Has the name of the original, for scripts that print it or compare it."""
    bases = (StageError, original) if not issubclass(StageError, original) else (StageError,)
    return types.new_class(original.__name__, bases, {}, lambda body: body.update(__module__=original.__module__))


def _members(error: Exception) -> dict[str, Any]:
    """Members that classes of C keep outside of the object's dictionary, as OSError does its number."""
    found: dict[str, Any] = {}
    for base in type(error).__mro__:
        for name, what in vars(base).items():
            if isinstance(what, types.MemberDescriptorType | types.GetSetDescriptorType) and not name.startswith("__") \
                    and base is not BaseException:
                with contextlib.suppress(AttributeError):  # has no value yet
                    found.setdefault(name, getattr(error, name))
    return found


def _each(values: dict[str, Any]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, found) for name, value in values.items() if (found := _pickled(value)) is not None)


def _pickled(value: Any) -> bytes | None:
    try:
        found = pickle.dumps(value)
    except Exception:  # whatever a user's own __reduce__ raises
        return None
    return found if len(found) <= MOST_BYTES else None


def _unpickled(value: bytes | None) -> Any:
    """None where this rank cannot: it does not have the class, or the class does not take what it gives."""
    try:
        return None if value is None else pickle.loads(value)
    except Exception:
        return None

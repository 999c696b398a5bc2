"""Registry of passes by name and by the annotations they provide.

The project's own passes are found by importing the modules of `passes.analyses`, `passes.checkpointing`, `passes.pipeline`,
`passes.sharding` and `passes.transforms`; those of other packages through the entry-point group `hpml_passes`, whose entries
name a pass class or a module that registers passes when it is imported:

    [project.entry-points.hpml_passes]
    my_pass = "my_package.my_pass:MyPass"
"""
from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import pkgutil
import warnings
from typing import Any, TypeVar

import passes
from passes.annotations import Key
from passes.errors import BadInput
from passes.registrations import Registrations

P = TypeVar("P", bound=type[Any])  # of a `passes.base.Pass`, which reads this table for its errors

ENTRY_POINT_GROUP = "hpml_passes"
_PACKAGES = ("analyses", "checkpointing", "pipeline", "sharding", "transforms")
PASSES: Registrations[type[Any]] = Registrations()


def register(cls: P) -> P:
    """Class decorator, above `@dataclass(frozen=True)`: register the pass under its `name`, which must be unique."""
    where = f"{cls.__module__}.{cls.__qualname__}"
    if "__dataclass_params__" not in vars(cls):
        raise BadInput("a pass is a frozen dataclass", where, "write @dataclass(frozen=True) below @register")
    name = vars(cls).get("name")
    if not isinstance(name, str) or not name.isidentifier():
        raise BadInput(f"the name of a pass must be an identifier, got {name!r}", where, 'set `name = "my_pass"`')
    other = PASSES.get(name)
    # The same class again: a module was reloaded or a notebook cell was run twice.
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise BadInput(
            f"two passes are called {name!r}", f"{where} and {other.__module__}.{other.__qualname__}", "rename one"
        )
    PASSES[name] = cls
    return cls


def external_passes() -> dict[str, type[Any]]:
    """Passes of other packages, by name."""
    _load_entry_points_once()
    return {name: cls for name, cls in PASSES.items() if not cls.__module__.startswith("passes.")}


def names() -> tuple[str, ...]:
    """Sorted names of all passes that can be found."""
    _discover()
    return tuple(sorted(PASSES))


def lookup(name: str) -> type[Any]:
    """The pass class of that name; raises BadInput with close matches if there is none."""
    if name not in PASSES:
        _discover()
    if name not in PASSES:
        close = difflib.get_close_matches(name, PASSES) or sorted(PASSES)
        raise BadInput(f"no pass is called {name!r}", "registry", f"did you mean {', '.join(close)}?")
    return PASSES[name]


def providers(key: Key[Any]) -> tuple[str, ...]:
    """Sorted names of the passes that provide an annotation."""
    _discover()
    return tuple(sorted(name for name, cls in PASSES.items() if key in getattr(cls, "provides", ())))


@functools.cache
def _discover() -> None:
    """Import every module that may register a pass, once."""
    for package in (importlib.import_module(f"{passes.__name__}.{name}") for name in _PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    _load_entry_points_once()


@functools.cache
def _load_entry_points_once() -> None:
    load_entry_points()


def load_entry_points() -> None:
    """Load the passes of other packages; one that fails to load is skipped with a warning that names it."""
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            found = entry.load()
            if dataclasses.is_dataclass(found) and isinstance(found, type) and found not in PASSES.values():
                register(found)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # another package's bug must not keep this one from working
            package = entry.dist.name if entry.dist else "an unknown package"
            warnings.warn(
                f"pass {entry.name!r} of {package} ({entry.value}) is left out, it failed to load: {error!r}",
                RuntimeWarning,
                stacklevel=2,
            )

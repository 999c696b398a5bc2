"""Parameters that `load` and `initialize` stored before any graph was planned, by name."""
from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from passes.session_state import state_of


class _Loaded:
    """Names in their models, and parameters, in the order of the models."""

    is_of_models = True

    def __init__(self) -> None:
        self.parameters: list[tuple[str, weakref.ref[Any]]] = []


def note_loaded(parameters: Mapping[str, Any]) -> None:
    state_of(_Loaded).parameters += [(name, weakref.ref(parameter)) for name, parameter in parameters.items()]


def loaded_alike(name: str, parameter: Any) -> list[Any]:
    """The parameter, and those that other modules like the compiled one have at the same place: equal blocks that are compiled
    one by one have one graph as long as their parameters have one spec. name: in the compiled module."""
    others = [ref() for path, ref in state_of(_Loaded).parameters if f".{path}".endswith(f".{name}")]
    return [parameter, *(each for each in others if each is not None and each is not parameter
                         and each._spec is parameter._spec)]

"""Annotations: typed values that analysis passes write on a graph and other passes read.

A `Key` is typed and says where its values live: on nodes (`node.meta`) or on the graph (`graph_module.meta`). Values
are frozen, and the mapping that holds them is replaced, never changed: FX copies `meta` shallowly, so that two nodes
may hold the same mapping.

    FLOPS = Key("flops", float)                   # float on every call_function node
    BLOCKS = Key("blocks", Blocks, scope="graph")  # one value per graph module

    write(FLOPS, node, 2.0 * m * n * k)
    read(FLOPS, node)
"""
from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from torch import fx

from passes.errors import HpmlError
from passes.frozen import changeable

T = TypeVar("T")
Scope = Literal["node", "graph"]

_NAMESPACE = "hpml"  # the one entry of `meta` that holds all annotations


class AnnotationError(HpmlError):
    """A missing annotation, or a value or place that its key does not allow."""


def is_call(node: fx.Node) -> bool:
    """True for calls of an operator: the default nodes of a node key."""
    return node.op == "call_function"


@dataclass(frozen=True)
class Key(Generic[T]):
    """Name, type and place of an annotation; two keys are the same if these three are equal.

    name: how it is printed. value_type: a class or an alias (`tuple[int, ...]`, `int | None`), checked by `write`.
    scope: "node" or "graph". selects: for scope "node", the nodes that must have a value once a pass provides the key.
    """

    name: str
    value_type: type[T]
    scope: Scope = "node"
    selects: Callable[[fx.Node], bool] = field(default=is_call, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise AnnotationError(f"{self.name!r} is no name for a key", "Key", "use letters, digits and underscores")
        if self.scope not in ("node", "graph"):
            raise AnnotationError(f"unknown scope {self.scope!r}", f"key {self.name!r}", 'use "node" or "graph"')

    def __str__(self) -> str:
        return self.name


class Annotations(Mapping[Key[Any], Any]):
    """An immutable mapping from key to frozen value. Copying returns the object itself, since nothing in it can change."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[Key[Any], Any] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, key: Key[Any]) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[Key[Any]]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self._values.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Annotations:
        return self

    def adding(self, key: Key[Any], value: Any) -> Annotations:
        """These, with another value of `key`."""
        found = Annotations(self._values)
        found._values[key] = value
        return found

    def changed(self, other: Annotations) -> list[Key[Any]]:
        """Keys that have another value there, or a value on one side only."""
        mine, theirs = self._values, other._values
        return [key for key in {**mine, **theirs} if mine.get(key, _NONE) is not theirs.get(key, _NONE)]


_NONE = Annotations()


def annotations_of(where: fx.Node | fx.GraphModule) -> Annotations:
    """All annotations of a node or graph module."""
    return where.meta.get(_NAMESPACE, _NONE)


def read(key: Key[T], where: fx.Node | fx.GraphModule) -> T:
    """The value of `key` there; AnnotationError if there is none."""
    _check_place(key, where)
    try:
        return annotations_of(where)[key]
    except KeyError:
        step = "run a pass that provides it first; passes.registry.providers(key) names it"
        raise AnnotationError(f"no annotation {key.name!r}", _describe(where), step) from None


def write(key: Key[T], where: fx.Node | fx.GraphModule, value: T) -> None:
    """Set `key` there; AnnotationError if the value has another type or could be changed later."""
    _check_place(key, where)
    if not _matches(value, key.value_type):
        raise AnnotationError(
            f"annotation {key.name!r} takes {_type_name(key.value_type)}, got {type(value).__name__}: {value!r}"[:300],
            _describe(where),
            "convert the value before writing it",
        )
    if (culprit := changeable(value)) is not None:
        raise AnnotationError(
            f"the value of annotation {key.name!r} is not frozen: it holds {culprit}",
            _describe(where),
            "write numbers, strings, tuples, FrozenMaps and frozen dataclasses; for a node its name",
        )
    where.meta[_NAMESPACE] = annotations_of(where).adding(key, value)


def has(key: Key[Any], where: fx.Node | fx.GraphModule) -> bool:
    """True if `key` has a value there. A graph module has a node key if every node that the key selects has it."""
    if key.scope == "node" and isinstance(where, fx.GraphModule):
        return not missing(key, where)
    _check_place(key, where)
    return key in annotations_of(where)


def missing(key: Key[Any], graph_module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a node key selects and that have no value for it."""
    return [node for node in graph_module.graph.nodes if key.selects(node) and key not in annotations_of(node)]


def drop(key: Key[Any], where: fx.Node | fx.GraphModule) -> None:
    """Remove `key` there, if it is there. For a node key, a graph module stands for all its nodes."""
    if key.scope == "node" and isinstance(where, fx.GraphModule):
        for node in where.graph.nodes:
            drop(key, node)
        return
    _check_place(key, where)
    old = annotations_of(where)
    if key in old:
        where.meta[_NAMESPACE] = Annotations({k: v for k, v in old.items() if k != key})


def keys_on(graph_module: fx.GraphModule) -> frozenset[Key[Any]]:
    """The keys that have a value on the graph module or on any of its nodes."""
    found = set(annotations_of(graph_module))
    for node in graph_module.graph.nodes:
        found.update(annotations_of(node))
    return frozenset(found)


def _check_place(key: Key[Any], where: fx.Node | fx.GraphModule) -> None:
    if not isinstance(key, Key):
        raise AnnotationError(f"{key!r} is not a Key", _describe(where), "make one: Key(name, type, scope)")
    wanted = fx.Node if key.scope == "node" else fx.GraphModule
    if not isinstance(where, wanted):
        raise AnnotationError(
            f"annotation {key.name!r} belongs to a {'node' if key.scope == 'node' else 'graph module'}",
            _describe(where),
            f"pass a {wanted.__name__}",
        )


def _describe(where: object) -> str:
    if isinstance(where, fx.Node):
        return f"node {where.format_node() or where.name}"
    return "a GraphModule" if isinstance(where, fx.GraphModule) else f"a {type(where).__name__}"


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _matches(value: object, hint: Any) -> bool:
    """isinstance for the part of the typing language that frozen values need."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None:
        return value is None
    if hint is float or hint is int:  # PEP 484: an int is a float; a bool is neither
        return isinstance(value, (float, int) if hint is float else int) and not isinstance(value, bool)
    if origin is None:
        return isinstance(value, hint)
    if origin is Union or origin is types.UnionType:
        return any(_matches(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple and isinstance(value, tuple):
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_matches(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_matches, value, args))
    if origin is frozenset and isinstance(value, frozenset):
        return all(_matches(item, args[0]) for item in value)
    return isinstance(value, origin)

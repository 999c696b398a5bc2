"""Result of a pass: snapshots of the graph before and after, and their difference."""
from __future__ import annotations

import difflib
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from passes.annotations import Annotations, Key, annotations_of


class _NodeRecord(NamedTuple):
    """Record of one node. FX replaces the arguments of a node and never changes them, so keeping them is a copy."""

    node: fx.Node
    op: str
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attribute: object  # target of get_attr and call_module; kept alive, so that its id stays unique
    annotations: Annotations

    def text(self, annotations: bool) -> str:
        if self.op == "placeholder":
            line = f"{self.name} = placeholder"
        elif self.op == "output":
            line = f"return {self.args[0]}"
        else:
            arguments = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
            line = f"{self.name} = {self._target()}({', '.join(arguments)})"
        return f"{line}  # {self.annotations}" if annotations and self.annotations else line

    def _target(self) -> str:
        if self.op in ("get_attr", "call_module", "call_method"):
            return f"{self.op}[{self.target}]"
        return target_name(self.target)


def target_name(target: Any) -> str:
    """A call's target as it is printed: `aten.mm.default`, `operator.getitem`."""
    if isinstance(target, (types.FunctionType, types.BuiltinFunctionType)):
        return f"{(target.__module__ or '').lstrip('_')}.{target.__name__}".lstrip(".")
    return str(target)


@dataclass(frozen=True)
class GraphSnapshot:
    """The nodes of a graph module at one moment, a few pointers per node. Graphs in submodules are recorded alike."""

    rows: tuple[_NodeRecord, ...]
    graph_annotations: Annotations
    nested: tuple[GraphSnapshot, ...]

    @staticmethod
    def take(graph_module: fx.GraphModule) -> GraphSnapshot:
        rows = tuple(
            _NodeRecord(n, n.op, n.name, n.target, n.args, n.kwargs,
                        attribute_of(graph_module, n) if n.op in ("get_attr", "call_module") else None, annotations_of(n))
            for n in graph_module.graph.nodes
        )
        inner = {id(row.attribute): row.attribute for row in rows if isinstance(row.attribute, fx.GraphModule)}
        return GraphSnapshot(rows, annotations_of(graph_module), tuple(map(GraphSnapshot.take, inner.values())))

    def first_difference(self, other: GraphSnapshot) -> str | None:
        """The first place where the structure differs, as text; None if it is the same. Annotations do not count."""
        for mine, theirs in zip(self.rows, other.rows, strict=False):
            if not _same_row(mine, theirs):
                return f"`{mine.text(False)}` became `{theirs.text(False)}`"
        if len(self.rows) != len(other.rows):
            return f"{len(self.rows)} nodes became {len(other.rows)}"
        inner = (a.first_difference(b) for a, b in zip(self.nested, other.nested, strict=False))
        return next((text for text in inner if text is not None), None)

    def lines(self, annotations: bool = False) -> list[str]:
        """The printed graph; with `annotations`, each node's as a comment."""
        head = [f"# {self.graph_annotations}"] if annotations and self.graph_annotations else []
        return head + [row.text(annotations) for row in self.rows]

    def written_since(self, before: GraphSnapshot) -> dict[Key[Any], int]:
        """Number of places where each key was written, changed or removed since `before`; assumes the same nodes."""
        counts: dict[Key[Any], int] = {}
        pairs = [(before.graph_annotations, self.graph_annotations)]
        pairs += [(a.annotations, b.annotations) for a, b in zip(before.rows, self.rows, strict=True)]
        for old, new in pairs:
            if old is not new:
                for key in old.changed(new):
                    counts[key] = counts.get(key, 0) + 1
        return counts


@dataclass(frozen=True)
class PassResult:
    """Result of one run of a pass.

    seconds: wall time of the pass, with lint and recompile. added, removed: names of nodes. annotated: how many places
    an analysis wrote per key. `print(result.summary())` is one line, `print(result.diff())` everything.
    """

    pass_name: str
    graph_module: fx.GraphModule = field(repr=False)
    modified: bool
    seconds: float
    nodes_before: int
    nodes_after: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    annotated: tuple[tuple[str, int], ...] = ()
    before: GraphSnapshot = field(repr=False, kw_only=True)
    after: GraphSnapshot = field(repr=False, kw_only=True)

    def summary(self) -> str:
        """`fuse: modified, 12 -> 10 nodes (+0 -2), 1.2 ms`."""
        if self.annotated:
            what = "wrote " + ", ".join(f"{key} ({count})" for key, count in self.annotated)
        elif self.modified:
            counts = f"{self.nodes_before} -> {self.nodes_after} nodes (+{len(self.added)} -{len(self.removed)})"
            what = f"modified, {counts}"
        else:
            what = f"unmodified, {self.nodes_after} nodes"
        return f"{self.pass_name}: {what}, {self.seconds * 1e3:.1f} ms"

    def diff(self) -> str:
        """Unified diff of the printed graph, computed on call; for an analysis, with the annotations it wrote."""
        with_annotations = bool(self.annotated)
        before, after = self.before.lines(with_annotations), self.after.lines(with_annotations)
        names = (f"before {self.pass_name}", f"after {self.pass_name}")
        return "\n".join(difflib.unified_diff(before, after, *names, lineterm=""))


def attribute_of(graph_module: fx.GraphModule, node: fx.Node) -> object:
    """The tensor, module or subgraph that a get_attr or call_module node names; None for other nodes."""
    if node.op not in ("get_attr", "call_module"):
        return None
    found: Any = graph_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


def _same_row(a: _NodeRecord, b: _NodeRecord) -> bool:
    return (
        a.node is b.node
        and a.name == b.name
        and a.attribute is b.attribute
        and (a.target is b.target or a.target == b.target)
        and _same_value(a.args, b.args)
        and _same_value(a.kwargs, b.kwargs)
    )


def _same_value(a: object, b: object) -> bool:
    """Equality of arguments without evaluating a symbolic size (that would add a guard) or a tensor."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, (fx.Node, torch.Tensor)):
        return False
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_value(a[k], b[k]) for k in a)
    if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(a) == str(b)
    return bool(a == b)

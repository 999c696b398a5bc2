"""The pass contract: declarations of a pass, and the lifecycle that enforces them.

An analysis reads the graph and writes annotations; a transform changes the graph. A pass is a frozen dataclass whose
fields are its options, so that it can be compared, printed and saved.

    @register
    @dataclass(frozen=True)
    class CountUsers(AnalysisPass):
        name = "count_users"
        provides = (USERS,)

        def run(self, graph_module: fx.GraphModule) -> None:
            for node in graph_module.graph.nodes:
                if USERS.selects(node):
                    write(USERS, node, len(node.users))

    result = CountUsers()(graph_module)

Passes look at the nodes of the graph module they get; a graph inside its submodules (of a higher-order operator)
belongs to the node that calls it.
"""
from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from passes import registry
from passes.annotations import Key, drop, has, keys_on, missing
from passes.errors import HpmlError
from passes.pass_result import GraphSnapshot, PassResult

Keys = tuple[Key[Any], ...]
Outcome = tuple[bool, GraphSnapshot, dict[Key[Any], int]]
"""True if the graph was modified; the graph afterwards; how many places were annotated per key if it was not modified."""


class PassError(HpmlError):
    """A pass was run without its required annotations, or broke its declarations."""


@dataclass(frozen=True)
class Pass(ABC):
    """Base of both kinds of passes; subclass `AnalysisPass` or `TransformPass`.

    name: unique among registered passes; the class name if a pass sets none. requires: annotations it reads, which must
    be complete before it runs.
    """

    name: ClassVar[str]
    requires: ClassVar[Keys] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        for attribute in ("requires", "provides", "preserves"):
            keys = getattr(cls, attribute, ())
            if not isinstance(keys, tuple) or not all(isinstance(key, Key) for key in keys):
                where = f"{cls.__module__}.{cls.__qualname__}"
                raise PassError(f"`{attribute}` must be a tuple of Key, got {keys!r}", where, f"{attribute} = (KEY,)")

    @abstractmethod
    def run(self, graph_module: fx.GraphModule) -> bool | None:
        """The work of the pass. Call the pass itself, not this method."""

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        """Check requirements, run, check the declarations. Raises PassError naming the violated one."""
        if not isinstance(graph_module, fx.GraphModule):
            what = f"a pass takes a torch.fx.GraphModule, got {type(graph_module).__name__}"
            raise PassError(what, self.name, "trace the model first")
        self._check_required(graph_module)
        before = GraphSnapshot.take(graph_module)
        start = time.perf_counter()
        modified, after, written = self._run(graph_module, before)
        seconds = time.perf_counter() - start
        old, new = ({row.name: None for row in snapshot.rows} for snapshot in (before, after))
        return PassResult(
            pass_name=self.name,
            graph_module=graph_module,
            modified=modified,
            seconds=seconds,
            nodes_before=len(old),
            nodes_after=len(new),
            added=tuple(name for name in new if name not in old),
            removed=tuple(name for name in old if name not in new),
            annotated=tuple((key.name, count) for key, count in written.items()),
            before=before,
            after=after,
        )

    @abstractmethod
    def _run(self, graph_module: fx.GraphModule, before: GraphSnapshot) -> Outcome:
        """Run and check this kind of pass."""

    def _check_required(self, graph_module: fx.GraphModule) -> None:
        for key in self.requires:
            if not has(key, graph_module):
                known = registry.providers(key)
                step = f"run {' or '.join(map(repr, known))} first" if known else "no registered pass provides it"
                raise PassError(f"pass {self.name!r} requires {key.name!r}", _where(key, graph_module), step)


class AnalysisPass(Pass):
    """Writes the annotations in `provides`, and changes nothing else."""

    provides: ClassVar[Keys] = ()

    @abstractmethod
    def run(self, graph_module: fx.GraphModule) -> None: ...

    def _run(self, graph_module: fx.GraphModule, before: GraphSnapshot) -> Outcome:
        returned: object = self.run(graph_module)
        if returned is not None:
            what = f"analysis {self.name!r} returned {type(returned).__name__}"
            raise PassError(what, f"{type(self).__qualname__}.run", "write annotations and return nothing")
        after = GraphSnapshot.take(graph_module)
        if (difference := before.first_difference(after)) is not None:
            raise PassError(f"analysis {self.name!r} changed the graph", difference, "make it a TransformPass")
        written = after.written_since(before)
        for key in written:
            if key not in self.provides:
                what = f"analysis {self.name!r} wrote or removed {key.name!r}, which it does not provide"
                raise PassError(what, f"{type(self).__qualname__}.run", f"add the key to `provides` {self.provides}")
        for key in self.provides:
            if not has(key, graph_module):
                what = f"analysis {self.name!r} did not provide {key.name!r}"
                raise PassError(what, _where(key, graph_module), "write it on all that the key selects")
        return False, after, written


class TransformPass(Pass):
    """Changes the graph and returns True if it did. Only the annotations in `preserves` survive a change."""

    preserves: ClassVar[Keys] = ()

    @abstractmethod
    def run(self, graph_module: fx.GraphModule) -> bool: ...

    def _run(self, graph_module: fx.GraphModule, before: GraphSnapshot) -> Outcome:
        promised = [key for key in self.preserves if has(key, graph_module)]
        modified: object = self.run(graph_module)
        where = f"{type(self).__qualname__}.run"
        if not isinstance(modified, bool):
            what = f"transform {self.name!r} returned {modified!r}"
            raise PassError(what, where, "return True if it changed the graph, else False")
        if not modified:
            after = GraphSnapshot.take(graph_module)
            if (difference := before.first_difference(after)) is not None:
                what = f"transform {self.name!r} changed the graph and returned False"
                raise PassError(what, difference, "return True")
            return False, after, after.written_since(before)
        try:
            graph_module.graph.lint()
        except Exception as error:
            what = f"transform {self.name!r} left a graph that is not well formed: {error}"
            raise PassError(what, where, "insert nodes before their users; erase only nodes without users") from error
        graph_module.recompile()
        for key in keys_on(graph_module) - set(self.preserves):
            drop(key, graph_module)
        for key in promised:
            if not has(key, graph_module):
                what = f"transform {self.name!r} did not preserve {key.name!r}"
                step = "write it on the nodes that were added, or take it out of `preserves`"
                raise PassError(what, _where(key, graph_module), step)
        return True, GraphSnapshot.take(graph_module), {}


def _where(key: Key[Any], graph_module: fx.GraphModule) -> str:
    """Place where an incomplete annotation is missing."""
    if key.scope == "graph":
        return "the graph module"
    nodes = missing(key, graph_module)
    return f"{len(nodes)} nodes without it: {', '.join(node.name for node in nodes[:5])}" + ", …" * (len(nodes) > 5)

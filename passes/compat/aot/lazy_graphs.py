"""Graph modules whose code is generated on demand."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


def graph_module(root: Any, graph: Graph) -> GraphModule:
    """A GraphModule whose Python code is generated when it is first called or printed: passes change it many times before that,
    and generating code of thousands of calls takes as long as a pass does."""
    return _LazyGraphModule(root, graph)


@contextmanager
def lazy_graph_modules() -> Iterator[None]:
    """Context in which graphs that torch traces and partitions are such modules."""
    with _use_lazy_graph_module(True):
        yield

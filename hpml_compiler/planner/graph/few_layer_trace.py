"""Trace only a few layers of a deep model: three and four of them determine the cost of each further one.

A `ModuleList` of equal modules is cut to its first entries while tracing. Where the middle two of four layers are the same,
the graph of three is that of four without one of them (`passes.sharding.grouping.layer_removal`); else three are traced as
well. That the model really repeats itself is checked: the partition problems of both depths must correspond entity by entity
and edge by edge (`passes.sharding.formulation.depth_extrapolation`), else all layers are traced.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hpml_compiler.plans.schema import GraphPlan
from passes.graph.placement_graph import PlacementGraph

SHORT, LONG = 3, 4
WORTHWHILE = 8
"""Depth from which two short traces are cheaper than a full one."""


def repeated_lists(model: nn.Module) -> list[tuple[nn.Module, str, nn.ModuleList]]:
    """(parent, name, list) of every outermost list of `WORTHWHILE` or more modules of equal class and parameters, of which the
    first may have others: T5's has the positions."""
    found: list[tuple[nn.Module, str, nn.ModuleList]] = []
    inside: set[int] = set()
    for parent in model.modules():
        for name, child in parent._modules.items():
            if isinstance(child, nn.ModuleList) and id(child) not in inside and _alike(child):
                found.append((parent, name, child))
                inside.update(id(m) for m in child.modules())
    return found


def _alike(modules: nn.ModuleList) -> bool:
    def look(module: nn.Module):
        return type(module), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters())

    return (len(modules) >= WORTHWHILE and len({look(m) for m in [*modules][1:]}) == 1
            and len({type(m) for m in modules}) == 1)


def depth(model: nn.Module) -> int | None:
    """Number of layers that all repeated lists share; None if there are none or they differ."""
    lengths = {len(modules) for _, _, modules in repeated_lists(model)}
    return lengths.pop() if len(lengths) == 1 else None


def repeated_paths(model: nn.Module) -> list[str]:
    """Paths of the repeated lists in the model."""
    paths = {module: path for path, module in model.named_modules()}
    return [f"{paths[parent]}.{name}".lstrip(".") for parent, name, _ in repeated_lists(model)]


@dataclass(frozen=True)
class FewLayerTrace:
    """Relation of a graph of `LONG` layers to the deeper model. shorter: the graph with one layer less; lists: paths of the
    repeated lists, each of `layers` layers; parameters: names of all parameters of the model."""

    shorter: PlacementGraph
    lists: tuple[str, ...]
    layers: int
    parameters: tuple[str, ...]

    @property
    def further(self) -> int:
        return self.layers - LONG

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the traced layers of each list."""
        return tuple(tuple(f"{path}.{k}" for k in range(LONG)) for path in self.lists)

    def of_all_layers(self, record: GraphPlan) -> GraphPlan:
        """The plan with parameters of all layers: those of untraced layers are placed as those of the last traced one."""
        known = record.parameters
        templates = {name: name if name in known else self.of_traced_layer(name) for name in self.parameters}
        complete = {name: known[template] for name, template in templates.items() if template in known}
        return record.model_copy(update={"parameters": {**known, **complete}})

    def of_traced_layer(self, name: str) -> str:
        """Name of the parameter in the last traced layer that corresponds to one of any layer; others keep theirs."""
        for path in self.lists:
            if name.startswith(f"{path}."):
                _, _, rest = name.removeprefix(f"{path}.").partition(".")
                return f"{path}.{LONG - 1}.{rest}"
        return name


def layers_of(folded: FewLayerTrace | None) -> tuple[tuple[tuple[str, ...], ...], int]:
    """The arguments `lists` and `layers` of `BuildStorageProgram`."""
    return ((), 0) if folded is None else (folded.blocks, folded.layers)


def neighbors(model: nn.Module) -> dict[str, str]:
    """For each repeated list: path of the last but one traced layer -> path of the layer before it."""
    return {f"{path}.{LONG - 2}": f"{path}.{LONG - 3}" for path in repeated_paths(model)}


@contextlib.contextmanager
def with_few_layers(model: nn.Module, count: int) -> Iterator[None]:
    """Cut the model's repeated lists to `count` entries inside the context."""
    lists = repeated_lists(model)
    try:
        for parent, name, modules in lists:
            parent._modules[name] = nn.ModuleList(list(modules)[:count])
        yield
    finally:
        for parent, name, modules in lists:
            parent._modules[name] = modules

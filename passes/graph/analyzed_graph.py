"""An analyzed graph: everything that planning needs."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule

from passes.annotations import read
from passes.graph.graph_signature import GraphInput, GraphSignature
from passes.graph.placement_graph import PlacementGraph
from passes.graph.planning_keys import GRAPH_SIGNATURE, OPERATIONS
from passes.pass_result import attribute_of


@dataclass
class AnalyzedGraph:
    """A graph ready for planning, with the roles of its inputs. These survive when the rewrite drops the annotations."""

    gm: GraphModule
    inputs: Sequence[GraphInput]
    seconds: dict[str, float] = field(default_factory=dict)
    _hash: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.interface: GraphSignature = read(GRAPH_SIGNATURE, self.gm)
        operations = read(OPERATIONS, self.gm)
        self.graph: PlacementGraph = operations.graph
        self.rules = operations.rules

    def text(self) -> str:
        """The graph as text, without process-specific parts: equal on ranks that run the same program."""
        lines = []
        for node in self.gm.graph.nodes:
            value = node.meta.get("val")
            shape = tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", ""))
            kwargs = {k: v.type if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}  # device indices differ
            lines.append(f"{node.name} = {node.op} {node.target} {node.args} {kwargs} -> {shape}")
            if node.op == "get_attr" and isinstance(called := attribute_of(self.gm, node), GraphModule):
                lines.append(called.code)
        return "\n".join(lines)

    def hash(self) -> str:
        """Hash of the graph as it was when first asked: before it is rewritten."""
        if not self._hash:
            self._hash = hashlib.sha256(self.text().encode()).hexdigest()[:16]
        return self._hash

"""A plan tried out on a copy of the graph, on one rank alone: what would be kept for backward, and held."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planning.kept import decide_kept, obey_kept
from hpml_compiler.planning.offload_price import offload_price
from hpml_compiler.planning.plan_graph import Planned
from hpml_compiler.planning.room import Held, Sharing
from hpml_compiler.planning.shorten import Folded, layers_of
from hpml_compiler.plans.kept import KeptPlan
from passes.analysis.tape import MakeTape
from passes.costs.prices import MeshPrices
from passes.graph.annotated import Annotated
from passes.graph.copied import copied
from passes.keeping.keys import KeptNodes
from passes.machine.axis import device_axes
from passes.machine.cluster import Cluster
from passes.machine.mesh import mesh_from_pin
from passes.presets import after_planning, taping
from passes.solve.allowance import Allowance
from passes.transform.collectives import MeshGroups
from passes.transform.gather_ahead import starts_ahead

MOST_OF_THE_TIME = 0.5
"""Part of the time limit that one trial may take. Few come near this."""


@dataclass(frozen=True)
class Trial:
    """kept_gradients: numbers of the outputs that `.grad` will hold. written: positions of inputs that a call changes.
    sharing: what it leaves to other graphs of the step. device: the type of what will run it, "" if that is where its tensors
    are. folded: of which deeper model the graph has a few layers."""

    annotated: Annotated
    options: Options
    cluster: Cluster
    forward_outputs: int
    kept_gradients: Sequence[int]
    written: frozenset[int]
    sharing: Sharing
    device: str = ""
    folded: Folded | None = None

    def __call__(self, planned: Planned, allowance: Allowance | None = None) -> KeptNodes:
        """Values that the first rank keeps for backward; the others' graphs have the same calls. Process groups need not be
        there: none is used. allowance: for deciding it; a part of the options' time limit if None."""
        gm, within = self.rewritten(planned), allowance or Allowance(MOST_OF_THE_TIME * self.options.time_limit)
        kept = self._kept(gm, planned, within)
        if kept.fits or not starts_ahead(gm.graph):
            return kept
        at_once = replace(self._kept(self.rewritten(planned, ahead=False), planned, within), ahead=False)
        return at_once if at_once.peak_bytes < kept.peak_bytes else kept

    def _kept(self, gm: GraphModule, planned: Planned, allowance: Allowance) -> KeptNodes:
        return decide_kept(gm, self.forward_outputs, self.sharing.room(self.held(planned)), self.options, planned.record.name,
                           strict=False, allowance=allowance)

    def obey(self, planned: Planned, pinned: KeptPlan) -> KeptNodes | None:
        """What it keeps as a saved plan says; None where that does not fit, since the budget is another one."""
        gm = self.rewritten(planned, pinned.ahead)
        kept = obey_kept(gm, self.sharing.room(self.held(planned)), pinned, planned.record.name)
        return None if kept is None else replace(kept, ahead=pinned.ahead)

    def rewritten(self, planned: Planned, ahead: bool = True) -> GraphModule:
        """With its tape. ahead: with what is gathered under way while the block before computes, which holds more."""
        gm, axes = copied(self.annotated.gm), device_axes(planned.mesh)
        groups = MeshGroups(axes, (0,) * len(axes), tuple(f"trial_{axis.name}" for axis in axes))
        after_planning(planned.decision, groups, self.options.compiler, self.forward_outputs, self.kept_gradients,
                       compact=True, ahead=ahead, by_block=self.folded is not None)(gm)
        taping(self.tape(planned, groups))(gm)
        return gm

    def held(self, planned: Planned) -> Held:
        """By this graph on a rank, besides what it keeps."""
        memory, whole = planned.record.memory, self.sharing.whole
        part = memory.gradients / whole.gradients if whole.gradients else 1.0
        return Held(whole.name, memory.parameters, memory.gradients, memory.optimizer, part * whole.largest)

    def tape(self, planned: Planned, groups: MeshGroups) -> MakeTape:
        prices = MeshPrices(mesh_from_pin(planned.mesh, self.cluster), self.options.optimizer_states)
        return MakeTape(self.forward_outputs, prices, self.options.compiler == "inductor", self.written, groups.axis_of,
                        offload_price(self.options, self.cluster), self.device, *layers_of(self.folded))

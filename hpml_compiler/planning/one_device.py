"""What one device keeps of a graph under a byte budget: where everything lies is no question there."""
from __future__ import annotations

import functools
from dataclasses import replace

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planning.bound import proven
from hpml_compiler.planning.kept import decide_kept, obey_kept, with_kept
from hpml_compiler.planning.offload_price import offload_price
from hpml_compiler.planning.plan_graph import Planned, plan_graph
from hpml_compiler.planning.room import Sharing
from hpml_compiler.planning.shorten import Folded, layers_of
from hpml_compiler.plans.kept import KeptPlan
from passes import compat
from passes.analysis.tape import MakeTape
from passes.costs.prices import MeshPrices
from passes.graph.annotated import Annotated
from passes.keeping.keys import KeptNodes
from passes.machine.cluster import Cluster
from passes.machine.mesh import enumerate_meshes
from passes.partition.lifetimes import Lifetimes
from passes.presets import one_device as prepare
from passes.presets import taping

NO_LIMIT = 10.0**15
"""Bytes that no device has."""


def keep_on_one_device(joint: GraphModule, forward_outputs: int, sharing: Sharing, cluster: Cluster,
                       pinned: KeptPlan | None = None, folded: Folded | None = None) -> KeptNodes:
    """joint: as it was traced; afterwards it is ready to be cut, and has its tape. pinned: what a plan that is obeyed keeps.
    folded: of which deeper model it has a few layers. Raises Infeasible, with the smallest budget that was found to work."""
    options, written = sharing.options, frozenset(compat.inputs_written(joint))
    prepare(options.compiler)(joint)
    (mesh,) = enumerate_meshes(cluster)
    prices = MeshPrices(mesh, options.optimizer_states)
    lists, layers = layers_of(folded)
    taping(MakeTape(forward_outputs, prices, options.compiler == "inductor", written,
                    offload_us=offload_price(options, cluster), lists=lists, layers=layers))(joint)
    room, name = sharing.room(sharing.whole), sharing.whole.name
    if pinned is not None and (kept := obey_kept(joint, room, pinned, name)) is not None:
        return kept
    return decide_kept(joint, forward_outputs, room, options, name, strict=True)


def plan_of_one_device(annotated: Annotated, kept: KeptNodes, options: Options, cluster: Cluster, name: str,
                       folded: Folded | None = None) -> Planned:
    """The plan of a graph of which that was decided. options: with the budget in bytes."""
    # What is kept fits; what the placement problem would count, all that might be, need not.
    free = options.model_copy(update={"memory_budget": None, "plan": None})
    plan = functools.partial(plan_graph, annotated, free, cluster, name=name, lifetimes=Lifetimes(0.0), budget_bytes=NO_LIMIT)
    planned = plan() if folded is None else plan(shorter=folded.shorter, further=folded.further)
    record = planned.record if folded is None else folded.of_all_layers(planned.record)
    return proven(replace(planned, kept=kept, record=with_kept(record, kept, options)), planned, options.gap)

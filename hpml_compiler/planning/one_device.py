"""What one device keeps of a graph under a byte budget: where everything lies is no question there."""
from __future__ import annotations

from torch.fx import GraphModule

from hpml_compiler.planning.kept import decide_kept
from hpml_compiler.planning.offload_price import offload_price
from hpml_compiler.planning.room import Sharing
from passes import compat
from passes.analysis.tape import MakeTape
from passes.costs.prices import MeshPrices
from passes.keeping.keys import KeptNodes
from passes.machine.cluster import Cluster
from passes.machine.mesh import enumerate_meshes
from passes.presets import one_device as prepare
from passes.presets import taping


def keep_on_one_device(joint: GraphModule, forward_outputs: int, sharing: Sharing, cluster: Cluster) -> KeptNodes:
    """joint: as it was traced; afterwards it is ready to be cut, and has its tape. Raises Infeasible, with the smallest budget
    that was found to work."""
    options, written = sharing.options, frozenset(compat.inputs_written(joint))
    prepare(options.compiler)(joint)
    (mesh,) = enumerate_meshes(cluster)
    prices = MeshPrices(mesh, options.optimizer_states)
    taping(MakeTape(forward_outputs, prices, options.compiler == "inductor", written,
                    offload_us=offload_price(options, cluster)))(joint)
    return decide_kept(joint, forward_outputs, sharing.room(sharing.whole), options, sharing.whole.name, strict=True)

"""`hpml_compiler.plan`: plan a model's training step for a cluster, without any device."""
from __future__ import annotations

import os
from typing import Any

from torch import nn

from hpml_compiler.instruments.heterogeneous.share_planning import plan_mixed
from hpml_compiler.options import Options
from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph import measured_costs
from hpml_compiler.planner.joint.open_planner import plan_open
from hpml_compiler.planner.traced_model import TracedModel
from passes.errors import BadInput
from passes.hardware.cluster import Cluster


def plan(model: nn.Module, batch: Any, cluster: str | os.PathLike[str] | Cluster | None = None, *,
         run_breaks: bool = False, **options: Any) -> Plan | MixedPlan:
    """Plan one training step of `model` on the global `batch`.

    batch: arguments of the model, a mapping or a tuple. cluster: `8x8:h100-80g`, a JSON file, a `Cluster`, or None for
    one device of this machine; a cluster with several groups of devices gives a `MixedPlan`, in which each group takes a
    share of the rows. run_breaks: run Python code between the graphs of a model that breaks on the real weights and batch;
    otherwise it runs on fake ones, and parts that cannot run so are listed in the plan's `unplanned`. options: those of
    `Options`. Tensors may be on the meta device. Raises BadInput and Infeasible.
    """
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise BadInput(f"the model is {what}, not a torch.nn.Module", "plan(model, ...)",
                       "give the module itself, as in plan(Model(), batch)")
    if isinstance(cluster, (str, os.PathLike)):
        options["cluster"] = os.fspath(cluster)
    elif cluster is not None and not isinstance(cluster, Cluster):
        raise BadInput(f"the cluster is a {type(cluster).__name__}: {cluster!r:.80}", "plan(cluster=...)",
                       'write NODESxDEVICES:DEVICE, such as "8x8:h100-80g", a path, or a Cluster')
    parsed = Options.parse(options)
    parsed = measured_costs.for_given(parsed, cluster)
    if not isinstance(cluster, Cluster):
        cluster = Cluster.parse(parsed.cluster) if parsed.cluster else Cluster.local(1, "cpu")
    if len(cluster.groups) > 1:
        if parsed.stage_ranks > 1:
            raise BadInput("planning for mixed devices does not support pipeline stages", "options['mesh']", "remove pp")
        if parsed.microbatches > 1:
            raise BadInput("planning for mixed devices does not support microbatches", "options['microbatches']",
                           "remove it; `simulate` can run such a plan with microbatches")
        return plan_mixed(model, batch, cluster, parsed)
    parsed = parsed.with_plan(cluster.world_size)
    alone = cluster.world_size == 1 and parsed.chooses_saved and parsed.microbatches == 1
    return plan_open(TracedModel(model, batch, parsed, alone, run_breaks, {}), cluster)

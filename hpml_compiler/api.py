"""`hpml_compiler.plan`: what would this model do on that cluster? No device is needed."""
from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from hpml_compiler.options import Options
from hpml_compiler.plan import Plan
from hpml_compiler.planning import Planned, annotate, plan_graph
from hpml_compiler.trace import trace
from passes import compat
from passes.cluster import Cluster
from passes.interface import describe
from passes.transform.normalize import normalize


def plan(model: nn.Module, batch: Any, cluster: str | Cluster | None = None, **options: Any) -> Plan:
    """Plan one training step of `model` on the global `batch`.

    batch: arguments of the model, a mapping or a tuple. cluster: `8x8:h100-80g`, a JSON file, a `Cluster`, or None for
    one device of this machine. options: those of `Options`. Tensors may be on the meta device. Raises BadInput and
    Infeasible.
    """
    if isinstance(cluster, str):
        options["cluster"] = cluster
    parsed = Options.parse(options)
    if not isinstance(cluster, Cluster):
        cluster = Cluster.parse(parsed.cluster) if parsed.cluster else Cluster.local(1, "cpu")
    parsed.check_mesh(cluster.world_size)
    given = parsed.load_plan()
    results: list[Planned] = []
    for number, traced in enumerate(trace(model, batch)):
        start = time.perf_counter()
        normalize(traced.gm, compat.fake_mode_of(traced.gm))
        annotated = annotate(traced.gm, describe(traced.gm, traced.inputs, traced.forward_outputs))
        annotated.seconds = {"trace": traced.seconds, "annotate": time.perf_counter() - start}
        if given is not None:
            given.check(annotated.hash(), torch.__version__, cluster.world_size)
        results.append(plan_graph(
            annotated, parsed, cluster, name=f"graph_{number}", given=given,
            fixed_mesh=results[0].mesh if results else None,
        ))
    return as_plan([r.record for r in results], [a for r in results for a in r.rejected], parsed, str(cluster))


def as_plan(graphs: list, rejected: list, options: Options, cluster: str) -> Plan:
    """A plan of graphs that share one mesh."""
    mesh = dict(graphs[0].mesh) if graphs else {}
    size = 1
    for n in mesh.values():
        size *= n
    return Plan(
        torch_version=torch.__version__, world_size=size, cluster=cluster, mesh=mesh, options=options.to_json(),
        graphs=[g for g in graphs if dict(g.mesh) == mesh], rejected=rejected,
    )


def last_plan() -> Plan:
    """The plan of what this process compiled so far; raises BadInput if nothing was."""
    from hpml_compiler import session
    from passes.errors import BadInput

    current = session.current()
    if not current.graphs:
        raise BadInput("nothing was compiled for several ranks yet", "last_plan", "call the compiled model first")
    training = [g for g in current.graphs if g.training] or current.graphs
    return as_plan(
        [*training, *(g for g in current.graphs if not g.training)], current.rejected, current.options, current.cluster
    )

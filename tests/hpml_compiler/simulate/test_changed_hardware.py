"""Plans for a `Cluster` with a built-in name, but other devices or links, are simulated as they were planned."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hpml_compiler
from hpml_compiler.demo.train import GPT
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.offline_planner import plan_traces
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.simulate import simulate
from hpml_compiler.visualize.description.peak_places import memory_limit
from passes.cost_model.energy_model import capped_cluster
from passes.hardware.cluster import Cluster
from passes.json_records import FrozenMap

BASE = Cluster.parse("2x2:h100-80g")


def changed(**factors: float) -> Cluster:
    """BASE with these fields of its device multiplied, or of a link, as in `inter_node__latency_us`."""
    group = BASE.group
    for name, factor in factors.items():
        part, _, entry = name.rpartition("__")
        record = getattr(group, part or "device")
        was = getattr(record, entry)
        now = FrozenMap({k: factor * v for k, v in was.items()}) if isinstance(was, FrozenMap) else type(was)(factor * was)
        group = replace(group, **{part or "device": replace(record, **{entry: now})})
    return Cluster((group,))


RATES = {"peak_flops_per_s": 0.1, "memory_bandwidth_bytes_per_s": 0.1, "inter_node__bandwidth_bytes_per_s": 0.1,
         "inter_node__latency_us": 10.0}
FURTHER = {"intra_node__bandwidth_bytes_per_s": 0.1, "intra_node__latency_us": 10.0, "launch_latency_us": 10.0}


@pytest.mark.parametrize(("mesh", "fields"), [({"dp": 2, "tp": 2}, RATES | FURTHER), ({"pp": 2, "tp": 2}, RATES)],
                         ids=["mesh", "stages"])
def test_each_changed_field_counts(mesh, fields):
    """The plan's own cluster is priced like a cluster that is given, also from a file, and not like the one of that name."""
    with torch.device("meta"):
        model, tokens = GPT(width=256, heads=2, layers=2, length=16), torch.zeros(64, 16, dtype=torch.long)
    options = {"mesh": mesh, "microbatches": 2}
    traces = TracedModel(model, (tokens, tokens), Options.parse(options), known={})
    before = plan_traces(traces, BASE)
    traces.options = Options.parse({**options, "plan": before})
    for name, factor in fields.items():
        cluster = changed(**{name: factor}, memory_bytes=0.5)
        assert str(cluster) == str(BASE)
        made = plan_traces(traces, cluster)
        found, priced = simulate(made), simulate(made, cluster)
        assert found.step_us == pytest.approx(priced.step_us, rel=1e-9), name
        assert found.energy_j == pytest.approx(priced.energy_j, rel=1e-9), name
        assert found.step_us > 1.05 * simulate(before).step_us, name
        again = Plan.from_json(made.to_json())
        assert again.hardware == cluster and simulate(again).step_us == found.step_us
        assert memory_limit(again) == (cluster.device.memory_bytes, "the memory of h100-80g")


def test_prices_under_a_power_cap_are_those_of_the_simulation():
    with torch.device("meta"):
        model, tokens = GPT(width=256, heads=2, layers=1, length=16), torch.zeros(64, 16, dtype=torch.long)
    made = hpml_compiler.plan(model, (tokens, tokens), "1x2:h100-80g", mesh={"dp": 2}, power_cap=300)
    assert simulate(made).energy_j == pytest.approx(simulate(made, capped_cluster(Cluster.parse("1x2:h100-80g"), 300)).energy_j)
    assert simulate(made).energy_j == pytest.approx(made.predicted.energy_j, rel=0.2)

"""The files that the table's command lines name: models that are right, models that are wrong, and broken files."""
from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.schema import GraphPlan
from passes.hardware.cluster import Cluster
from tests.hpml_compiler.simulate.toy import chain_plan

MODELS = '''
import sys
import torch
from torch import nn

number = 3
ROWS = (torch.zeros(8, 16),)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8)
    def forward(self, x):
        return self.b(torch.relu(self.a(x))).sum()

class Returns(nn.Module):
    """Returns whatever `make` makes of the weight and the input."""
    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.make = make
    def forward(self, x):
        return self.make(self.weight, x)

def tiny(): return Net(), ROWS
def by_name(): return Net(), {"x": ROWS[0]}
def one_tensor(): return Net(), ROWS[0]
def list_batch(): return [Net(), [ROWS[0]]]
def defaults(width=16): return Net(), ROWS
def prints():
    print("noise on stdout"); print("noise on stderr", file=sys.stderr)
    return Net(), ROWS
def on_meta():
    with torch.device("meta"):
        return Net(), (torch.zeros(8, 16),)
def frozen_half():
    model = Net(); model.a.requires_grad_(False)
    return model, ROWS
def double(): return Net().double(), (torch.zeros(8, 16, dtype=torch.float64),)
def evaluating(): return Net().eval(), ROWS
def deep(): return nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))), ROWS

def integers(): return Net(), (torch.zeros(8, 16, dtype=torch.long),)
def no_rows(): return Net(), (torch.zeros(0, 16),)
def wrong_width(): return Net(), (torch.zeros(8, 17),)
def other_dtype(): return Net(), (torch.zeros(8, 16, dtype=torch.float64),)
def unknown_name(): return Net(), {"y": ROWS[0]}
def too_many(): return Net(), (*ROWS, *ROWS)
def no_arguments(): return Net(), ()
def no_parameters(): return nn.ReLU(), ROWS
def frozen(): return Net().requires_grad_(False), ROWS
def detached(): return Returns(lambda weight, x: x.sum() * 2), ROWS
def returns_text(): return Returns(lambda weight, x: "text"), ROWS
def integer_loss(): return Returns(lambda weight, x: (x * weight).sum().long()), ROWS
def fails_in_forward():
    def fail(weight, x): raise ValueError("no such luck")
    return Returns(fail), ROWS
def data_dependent(): return Returns(lambda weight, x: (weight * x).sum() if x.sum() > 0 else weight.sum()), ROWS
def names_batch(): return Net(), {1: ROWS[0]}
def strings_batch(): return Net(), ("text",)
def none_batch(): return Net(), (None,)
def index_out_of_range(): return nn.Embedding(4, 8), (torch.full((2, 3), 7),)

def raises(): raise RuntimeError("broken on purpose")
def exits(): sys.exit(7)
def exits_well(): raise SystemExit
def interrupted(): raise KeyboardInterrupt
def recursive(): return recursive()
def needs_arguments(width, heads): return Net(), ROWS
def returns_none(): return None
def returns_model(): return Net()
def returns_three(): return Net(), ROWS, 3
def swapped(): return ROWS, Net()
def model_class(): return Net, ROWS
def number_batch(): return Net(), 3
def text_batch(): return Net(), "text"
def batch_of_none(): return Net(), None
def yields(): yield Net(), ROWS
async def later(): return Net(), ROWS
'''

OTHER_MODULES = {
    "models.py": MODELS,
    "syntax.py": "def f(:\n",
    "imports_nothing.py": "import no_such_package_anywhere\n",
    "script.py": "import sys\nprint('a script without a guard')\nsys.exit(3)\n",
    "raises_at_import.py": "raise ValueError('at import')\n",
    "empty.py": "",
    "latin.py": b"# caf\xe9\ndef f(): pass\n",
    "null.py": b"def f(): pass\n\0",
    "text.txt": "def f(): pass\n",
    "train.py": "print('trained')\n",
}


def row(**changes) -> dict:
    return {"target": "models.py:tiny", "cluster": "1x2:cpu", "mesh": {"dp": 2}, "seconds": 0.01} | changes


def _with_gradients(graph: GraphPlan) -> GraphPlan:
    """8 rows, and parameters h.0.weight that know their gradients grad0."""
    parameters = {name: each.model_copy(update={"gradient": f"grad{name.split('.')[1]}"})
                  for name, each in graph.parameters.items()}
    return graph.model_copy(update={"rows": 8, "parameters": parameters})


def write(folder: Path) -> None:
    """Everything that a command line of the table names, into `folder`."""
    for name, content in OTHER_MODULES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    plan = chain_plan(3)
    plan = plan.model_copy(update={"graphs": tuple(_with_gradients(graph) for graph in plan.graphs),
                                   "torch_version": importlib.metadata.version("torch")})
    good = json.loads(plan.to_json())
    plan.save(folder / "plan.json")
    plan.save(folder / "old.json")
    device = json.loads((Path(__file__).parents[3] / "passes" / "hardware" / "cluster_data" / "l4-24g.json").read_text())
    cluster = folder / "cluster.json"
    Cluster.parse("1x4:l4-24g").save(cluster)
    whole = json.loads(cluster.read_text())

    def text(name: str, content: str) -> None:
        (folder / name).write_text(content)

    def edited(name: str, data: dict, **changes) -> None:
        text(name, json.dumps(data | changes))

    text("cut.json", plan.to_json()[:500])
    text("empty.json", "")
    text("array.json", "[1, 2]")
    text("number.json", "3")
    text("nothing.json", "{}")
    text("deep.json", "[" * 100_000 + "]" * 100_000)
    text("deep_plan.json", '{"format_version": 5, "graphs": ' + "[" * 50_000 + "]" * 50_000 + "}")
    text("twice.json", '{"a": 1, "a": 2}')
    text("not.json", "not JSON")
    text("long_number.json", '{"format_version": ' + "9" * 5000 + "}")
    (folder / "latin.json").write_bytes(b'{"caf\xe9": 1}')
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "folder.json").mkdir()
    edited("other_version.json", good, format_version=99)
    edited("text_version.json", good, format_version="1")
    edited("surprise.json", good, surprise=1)
    edited("no_graphs.json", good, graphs=[])
    edited("other_ranks.json", good, world_size=64)
    edited("no_axes.json", good, mesh={}, world_size=1, graphs=[])
    edited("other_mesh.json", good, mesh={"dp": 1, "tp": 2})
    edited("mixed.json", good, kind="mixed")
    edited("other_torch.json", good, torch_version="1.0.0")
    text("negative.json", plan.to_json().replace('"step_time_us": ', '"step_time_us": -'))
    text("nan.json", plan.to_json().replace('"predicted_us": ', '"predicted_us": NaN, "was": ', 1))
    text("bad_placement.json", plan.to_json().replace('"R"', '"Q"', 1))
    text("cluster_billion.json", json.dumps(whole | {"groups": [whole["groups"][0] | {"nodes": 10**9}]}))
    text("cluster_negative.json", json.dumps(whole | {"groups": [whole["groups"][0] | {"nodes": -1}]}))
    text("cluster_float.json", json.dumps(whole | {"groups": [whole["groups"][0] | {"nodes": 1.5}]}))
    text("cluster_no_groups.json", json.dumps(whole | {"groups": []}))
    text("cluster_many_groups.json", json.dumps({"groups": whole["groups"] * 40}))
    text("cluster_unknown_key.json", json.dumps(whole | {"gruops": []}))
    text("cluster_infinite.json", cluster.read_text().replace('"memory_bandwidth_bytes_per_s": ',
                                                              '"memory_bandwidth_bytes_per_s": 1e999, "x": '))
    text("device.json", json.dumps(device))
    text("device_negative.json", json.dumps(device | {"device": device["device"] | {"memory_bytes": -5}}))
    text("device_nan.json", json.dumps(device).replace('"launch_latency_us": ', '"launch_latency_us": NaN, "x": '))
    text("device_nothing.json", "{}")
    text("rows.json", json.dumps([row(), row(name="other", seconds=0.02, mesh={"tp": 2})]))
    text("rows_empty.json", "[]")
    text("rows_mesh.json", json.dumps([row(mesh={"dp": 3})]))
    text("rows_negative.json", json.dumps([row(seconds=-1)]))
    text("rows_nothing.json", json.dumps([{}]))
    text("rows_no_target.json", json.dumps([row(target="models.py:nowhere")]))
    text("rows_huge.json", json.dumps([row(cluster="999999999x8:cpu")]))
    text("rows_held_out.json", json.dumps([row(held_out=True)]))
    text("rows_other_device.json", json.dumps([row(), row(name="other", cluster="1x2:l4-24g")]))
    assert Plan.load(folder / "plan.json") == plan

"""Pins of a search that fit neither the devices, the model, the batch nor each other: (command line, exit code, words).

The words are on stderr; where the code is 0, they are a warning or a part of the table. Models are those of PINS below.
"""
from __future__ import annotations

from pathlib import Path

import hpml_compiler
from hpml_compiler.cli_target import load_target

PINS = '''
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
    def forward(self, x): return x + self.down(torch.relu(self.up(self.norm(x))))

class Chain(nn.Module):
    def __init__(self, norm=False, outside=False):
        super().__init__()
        self.layers, self.outside = nn.ModuleList(Block(norm) for _ in range(4)), outside
    def forward(self, x):
        for each in self.layers: x = each(x)
        return x if self.outside else x.square().mean()

ROWS = torch.zeros(8, 16)
def chain(): return Chain(), (ROWS,)
def norm(): return Chain(norm=True), (ROWS,)
def outside(): return Chain(outside=True), (ROWS,)
def one_row(): return Chain(), (ROWS[:1],)
'''

TABLE = [
    # stages and axes that do not fit the devices
    ("chain --cluster 1x8:cpu --fix pp=3", 2, "take a pp that divides 8 (1, 2, 4, 8)"),
    ("chain --cluster 2x4:cpu --fix pp=3 --fix dp=2", 2, "set pp=4"),
    ("chain --cluster 2x6:cpu --fix pp=4 --fix dp=3", 2, "the devices per node: 1, 2, 3, 6"),
    ("chain --cluster 1x2:cpu --fix pp=0", 2, "positive integer"),
    ("chain --cluster 1x2:cpu --fix pp=2 --fix dp=2", 2, "set pp=1, or set dp=1, or start 4 ranks"),
    ("chain --cluster 1x2:cpu --fix dp=2 --fix 'mesh={\"tp\": 2}'", 2, "set dp=1, or set tp=1"),
    ("chain --cluster 1x1:cpu --fix pp=2", 2, "multiplies to 2, but there are 1 ranks"),
    ("chain --cluster 7x17:cpu --fix dp=8", 2, "set dp=119"),
    ("chain --cluster 7x1:cpu --fix pp=2", 2, "set pp=7"),
    ("chain --cluster 1x4:cpu --fix x=2", 2, "multiplies to 2, but there are 4 ranks"),
    ("chain --cluster 1x1:h100-80g+1x1:v100-32g --fix pp=2", 2, "remove pp"),
    ("chain --cluster 1x2:cpu --fix 'mesh_order=[\"pp\",\"dp\"]'", 2, "left to the solver"),
    ("one_row --cluster 7x3:cpu --json", 0, '"status"'),
    # stages that do not fit the model
    ("chain --cluster 1x8:cpu --fix pp=8", 2, "has 5 consecutive parts that compute something, fewer than 8 stages"),
    ("chain --cluster 1x2:cpu --fix pp=2 --fix virtual_stages=4 --fix microbatches=2", 2, "take at most 5 stages"),
    # microbatches
    ("chain --cluster 1x2:cpu --fix dp=2 --fix microbatches=3", 0, "into 2 microbatches, since 3 do not divide it; 4 do"),
    ("chain --fix microbatches=16", 0, "into 8 microbatches, since 16 do not divide it"),
    ("chain --fix microbatches=0", 2, "microbatches"),
    ("chain --fix microbatches=two", 2, "microbatches"),
    ("chain --fix microbatches=auto", 0, "one device"),
    ("norm --cluster 1x2:cpu --fix microbatches=2", 0, "rows of the batch depend on each other at sub_tensor, sub"),
    ("norm --cluster 1x2:cpu --fix dp=2 --memory-budget 20KiB", 3, "so that there are no microbatches"),
    # schedules
    ("chain --cluster 1x2:cpu --fix pp=2 --fix schedule=interleaved --fix virtual_stages=2 --fix microbatches=1", 2,
     "use 2 microbatches"),
    ("chain --cluster 1x2:cpu --fix virtual_stages=2", 0, "pp"),
    ("chain --cluster 1x2:cpu --fix dp=2 --fix virtual_stages=2", 2, "virtual_stages=2 needs pipeline stages"),
    ("chain --cluster 1x2:cpu --fix pp=2 --fix virtual_stages=2 --fix schedule=1f1b", 2, "leave virtual_stages out"),
    ("chain --cluster 1x2:cpu --fix pp=2 --fix schedule=zbv --fix microbatches=4", 2, "set virtual_stages=2"),
    ("chain --cluster 1x2:cpu --fix schedule=1f1b", 0, "pp"),
    ("chain --fix schedule=1f1b", 2, "add the axis pp"),
    ("chain --cluster 1x2:cpu --fix schedule=bitonic", 2, "zero_bubble"),
    ("outside --cluster 1x2:cpu --fix pp=2 --fix microbatches=2 --fix schedule=1f1b", 0, "graph_0 has no loss"),
    # recomputation, budgets, ZeRO
    ("chain --fix recompute=full --memory-budget 1GiB", 2, "give one of the two"),
    ("chain --fix recompute=some", 2, "selective"),
    ("chain --fix 'recompute={\"h.*\": \"full\"}'", 0, "matches none of its blocks: layers.0"),
    ("chain --cluster 1x2:cpu --memory-budget 20KiB", 3, "use at least 4 devices, or set memory_budget to"),
    ("chain --cluster 1x2:cpu --fix pp=2 --fix microbatches=2 --memory-budget 1KiB", 3, "more microbatches than 2"),
    ("chain --memory-budget 1KiB", 3, "use at least 67 devices"),
    ("chain --cluster 7x1:cpu --memory-budget 8KiB", 3, "use at least 9 devices"),
    ("chain --fix offload=saved", 2, "needs a memory_budget"),
    ("chain --fix gather=once --fix zero=3", 2, "leave one of the two out"),
    ("chain --fix gather=each --fix zero=2", 2, "leave one of the two out"),
    ("chain --fix gather=each --fix zero=0 --fix virtual_stages=2", 2, "leave one of the two out"),
    # solvers and their limits
    ("chain --solver NoSuch", 2, "unknown solver"),
    ("chain --solver GUROBI_CMD --cluster 1x2:cpu", 4, "not installed"),
    ("chain --cluster 1x2:cpu --gap 0", 0, "optimal"),
    ("chain --cluster 1x2:cpu --memory-budget 60KiB --time-limit 1e-6", 0, "feasible"),
    ("chain --cluster 1x2:cpu --memory-budget 30KiB --time-limit 1e-6", 3, "use at least 3 devices"),
    ("chain --cluster 1x8:cpu --memory-budget 9KiB --time-limit 1e-9", 3, "others were planned, of which none takes less than"),
    # saved plans
    ("chain --cluster 1x2:cpu --fix plan=plan.json", 2, "another model"),
    ("chain --cluster 1x4:cpu --fix plan=chain.json", 2, "start 2 ranks"),
    ("chain --cluster 1x2:cpu --fix plan=other_torch.json", 2, "torch 1.0"),
    ("chain --cluster 1x2:cpu --fix plan=cut.json --fix dp=2", 2, "needs pipeline stages"),
    ("norm --cluster 1x2:cpu --fix plan=cut.json", 2, "another model or batch"),
]


def write(folder: Path) -> None:
    """The models and the plans that the table names. models.py and plan.json are there."""
    (folder / "pins.py").write_text((folder / "models.py").read_text() + PINS)
    model, batch = load_target(f"{folder / 'pins.py'}:chain")
    plan = hpml_compiler.plan(model, batch, cluster="1x2:cpu", mesh={"dp": 2})
    plan.save(folder / "chain.json")
    hpml_compiler.plan(model, batch, cluster="1x2:cpu", mesh={"pp": 2}, microbatches=2).save(folder / "cut.json")
    plan.model_copy(update={"torch_version": "1.0"}).save(folder / "other_torch.json")

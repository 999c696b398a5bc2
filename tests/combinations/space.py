"""Options that are combined, and the models and loop that they are tried on."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hpml_compiler.options import Options
from passes.errors import BadInput
from tests.combinations.covering import Combination
from tests.combinations.models import MODELS, ROWS, batch
from tests.scripts.use import Script

MESHES: dict[int, list[dict[str, int]]] = {
    1: [{}], 2: [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}],
    4: [{}, {"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 4}]}
"""By number of ranks; {} leaves the mesh to the solver."""


def values(ranks: int) -> dict[str, list[Any]]:
    """Values of each option, and of what a script does: model, loss, evaluation (between steps), and launches (2: as the next
    launch, from the graph cache; "plan": with the plan of the first). A memory_budget of 1 stands for the least that hpml says
    would do."""
    found: dict[str, list[Any]] = {
        "model": [*MODELS], "microbatches": [1, 2, 4], "memory_budget": [None, "1GiB", 1],
        "recompute": ["auto", "none", "selective", "full"], "offload": ["off", "saved", "optimizer", "all"],
        "compile_blocks": ["off", "on"], "launches": [1, 2, "plan"], "loss": ["inside", "outside"],
        "evaluation": [False, True],
        "zero": ["auto"], "gather": ["auto"], "mesh": MESHES[ranks], "schedule": ["auto"]}
    if ranks > 1:
        found["zero"] = ["auto", 0, 2, 3]
        found["gather"] = ["auto", "once", "each"]
        found["schedule"] = ["auto", "gpipe", "interleaved", "zero_bubble", "zbv"]
    return found


def options_of(chosen: dict[str, Any]) -> dict[str, Any]:
    """Options of the backend. chosen: a value of each."""
    found = {name: chosen[name] for name in ("microbatches", "memory_budget", "recompute", "offload", "compile_blocks", "zero",
                                             "gather", "schedule") if chosen[name] is not None}
    if chosen["mesh"]:
        found["mesh"] = chosen["mesh"]
    if virtual(chosen) > 1:
        found["virtual_stages"] = virtual(chosen)
    return {"compiler": "eager", "costs": "roofline", **found}


def virtual(chosen: dict[str, Any]) -> int:
    return 2 if chosen["schedule"] in ("interleaved", "zbv") else 1


def is_meant(chosen: dict[str, Any]) -> bool:
    """True if a user may mean this combination: options that need others have them."""
    stages = chosen["mesh"].get("pp", 1)
    if chosen["recompute"] != "auto" and chosen["memory_budget"] is not None:
        return False
    if (chosen["zero"], chosen["gather"]) in ((3, "once"), (0, "each"), (2, "each")):
        return False
    if (chosen["schedule"] != "auto" and stages == 1) or (chosen["offload"] == "saved" and chosen["memory_budget"] is None):
        return False
    return not (stages > 1 and chosen["microbatches"] < stages)


def refusal(chosen: dict[str, Any]) -> str | None:
    """The words by which the options refuse a combination."""
    try:
        Options.parse(options_of(chosen))
    except BadInput as error:
        return str(error)
    return None


def chosen_of(combination: Combination, ranks: int) -> dict[str, Any]:
    return {name: each[combination[name]] for name, each in values(ranks).items()}


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        return cross_entropy(self.model(x), labels)


def cross_entropy(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, -2), labels.flatten())


class Training:
    """A model with as many blocks as the pipeline has stages, at least two, and what trains it."""

    def __init__(self, script: Script, chosen: dict[str, Any]) -> None:
        depth = max(2, chosen["mesh"].get("pp", 1) * virtual(chosen))
        self.whole, self.inside = WithLoss(MODELS[chosen["model"]](depth)), chosen["loss"] == "inside"
        self.call = script.compile(self.whole if self.inside else self.whole.model)
        self.optimizer = torch.optim.AdamW(self.whole.parameters(), lr=1e-2)
        self.batch = batch(chosen["model"])

    def loss(self, rows: int) -> torch.Tensor:
        x, labels = (each[:rows] for each in self.batch)
        return self.call(x, labels) if self.inside else cross_entropy(self.call(x), labels)

    def step(self) -> float:
        loss = self.loss(ROWS)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def evaluate(self) -> float:
        """The loss of half of the rows."""
        self.whole.eval()
        with torch.no_grad():
            found = self.loss(ROWS // 2).item()
        self.whole.train()
        return found


def train(training: Training, chosen: dict[str, Any]) -> list[float]:
    """Two steps, with an evaluation after each if that is chosen."""
    return [each() for _ in range(2) for each in (training.step, *([training.evaluate] if chosen["evaluation"] else []))]

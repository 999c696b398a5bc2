"""Options that are combined, and the models and loop that they are tried on."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hpml_compiler.options import Options
from passes.errors import BadInput
from tests.combinations.covering import Combination
from tests.scripts.use import Script

ROWS, LENGTH, WIDTH, WORDS = 8, 8, 16, 32
MESHES: dict[int, list[dict[str, int]]] = {
    1: [{}], 2: [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}],
    4: [{}, {"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 4}]}
"""By number of ranks; {} leaves the mesh to the solver."""


def values(ranks: int) -> dict[str, list[Any]]:
    """Values of each option, and of what a script does: launches (2: as the next launch, from the graph cache; "plan": with the
    plan of the first) and model. A memory_budget of 1 stands for the least that hpml says would do."""
    found: dict[str, list[Any]] = {
        "model": [*MODELS], "microbatches": [1, 2, 4], "memory_budget": [None, "1GiB", 1],
        "recompute": ["auto", "none", "selective", "full"], "offload": ["off", "saved", "optimizer"],
        "compile_blocks": ["off", "on"], "launches": [1, 2, "plan"], "loss": ["inside", "outside"],
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
    if chosen["schedule"] in ("interleaved", "zbv"):
        found["virtual_stages"] = 2
    return {"compiler": "eager", "costs": "roofline", **found}


def is_meant(chosen: dict[str, Any]) -> bool:
    """True if a user may mean this combination: options that need others have them."""
    stages = chosen["mesh"].get("pp", 1)
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


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        scores = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), self.dropout, self.training)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    def __init__(self, dropout: float = 0.2, tied: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


MODELS = {"dropout": LanguageModel, "tied": lambda: LanguageModel(0.0, True), "perceptron": Perceptron}


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids, labels):
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())


def train(script: Script, chosen: dict[str, Any]) -> Any:
    """Two steps, with an evaluation of other rows between them."""
    whole = WithLoss(MODELS[chosen["model"]]())
    inside = chosen["loss"] == "inside"
    call = script.compile(whole if inside else whole.model)
    optimizer, found = torch.optim.AdamW(whole.parameters(), lr=1e-2), []
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    labels = ids.roll(-1, 1)

    def loss(rows: int) -> torch.Tensor:
        if inside:
            return call(ids[:rows], labels[:rows])
        return F.cross_entropy(call(ids[:rows]).flatten(0, 1), labels[:rows].flatten())

    for _ in range(2):
        step = loss(ROWS)
        step.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole.eval()
        with torch.no_grad():
            found += [step.item(), loss(ROWS // 2).item()]
        whole.train()
    return found, whole, optimizer

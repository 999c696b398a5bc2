"""Tapes of models of equal layers, as many as one likes: layer k of one has the same as layer k of another."""
from __future__ import annotations

import random
from dataclasses import dataclass

from passes.simulation.memory.storage_program import ProgramOp, Storage, StorageProgram

Call = tuple[str, tuple[str, ...], int, dict]
"""What it makes, what it reads, its bytes, and what else is true of its run. A name is of the layer itself, but for `before`
and `after`, which are what the layers beside it hand on, and `mask`, which is one for all."""


@dataclass
class _Maker:
    runs: list[ProgramOp]
    storages: list[Storage]
    numbers: dict[str, int]

    def given(self, name: str, nbytes: int, given: str) -> None:
        self.numbers[name] = len(self.storages)
        self.storages.append(Storage(name, nbytes, None, given))

    def call(self, name: str, reads, nbytes: int, backward=False, block="", **rest) -> None:
        self.numbers[name] = len(self.storages)
        self.storages.append(Storage(name, nbytes, len(self.runs), "", 0.25 * nbytes))
        rest.setdefault("us", 1.0)
        self.runs.append(ProgramOp(name, backward, reads=tuple(dict.fromkeys(self.numbers[r] for r in reads)),
                                   makes=(self.numbers[name],), block=block, **rest))


def template(seed: int, inlining: bool = True) -> tuple[list[Call], list[Call]]:
    """Forward and backward of a layer. Its last call of forward hands on `x`, the last of backward `g`, which is in memory.
    With an odd seed, layers share a mask."""
    draw = random.Random(seed)
    shared = "mask" if seed % 2 else "weight"
    forward: list[Call] = []
    for k in range(draw.randint(2, 5)):
        light = inlining and draw.random() < 0.4
        reads = {draw.choice([*(name for name, *_ in forward), "before"]), draw.choice(["before", shared, "weight"])}
        forward.append((f"f{k}", tuple(sorted(reads)), draw.randint(1, 20), {
            "us": float(draw.randint(1, 9)), "repeatable": draw.random() < 0.85, "inlined": light,
            "fusing": light or inlining and draw.random() < 0.3}))
    made = [name for name, *_ in forward]
    forward.append(("x", ("before", made[-1]), 10, {"us": 1.0, "inlined": inlining, "fusing": inlining}))
    backward: list[Call] = []
    if draw.random() < 0.3:
        backward.append(("late", (made[0],), draw.randint(1, 9), {"backward": False}))
        made.append("late")
    for k in range(draw.randint(2, 5)):
        reads = ["after", draw.choice([*made, "before", "weight", shared]), draw.choice([n for n, *_ in backward] + made)]
        fusing = inlining and draw.random() < 0.4
        rest = {"fusing": fusing, "inlined": fusing and draw.random() < 0.5}
        backward.append((f"d{k}", tuple(reads), draw.randint(1, 20), rest))
    if draw.random() < 0.3:
        backward.append(("gathered", ("weight",), 7, {"workspace_bytes": 7}))
    backward.append(("g", ("after", "before", *(name for name, *_ in backward if name != "late")), 10, {}))
    return forward, backward


def layered(seed: int, layers: int, inlining: bool = True, ahead: bool = False, at_once: bool = False) -> StorageProgram:
    """An input, layers, a loss; then backward of all of that. ahead: in both phases a part of the weight of each layer is
    gathered while the layer before is at work, after its first call; at_once: in backward before that, outside of a block."""
    forward, backward = template(seed, inlining)
    draw = random.Random(seed)
    m = _Maker([], [], {})
    m.given("input", 0, "forward")
    m.given("tangent", 1, "backward")
    m.call("mask", ["input"], 6)
    m.call("embedded", ["input"], 10)
    for k in range(layers):
        m.given(f"{k}.weight", 3, "forward")

    def gather(k: int, name: str, backward: bool) -> None:
        if ahead and 0 <= k < layers:
            m.call(f"{k}.{name}", [f"{k}.weight"], 9, backward, "" if at_once and backward else f"l.{k}", us=2.0)

    gather(0, "whole", False)
    for k in range(layers):
        def place(name: str, k: int = k) -> str:
            if name == "before":
                return f"{k - 1}.x" if k else "embedded"
            return name if name == "mask" else f"{k}.{name}"

        for number, (name, reads, nbytes, rest) in enumerate(forward):
            more = ["whole"] if ahead and name == "x" else []
            m.call(f"{k}.{name}", map(place, (*reads, *more)), nbytes, block=f"l.{k}", **rest)
            if not number:
                gather(k + 1, "whole", False)
    m.call("logits", [f"{layers - 1}.x"], 40)
    m.call("loss", ["logits"], 1)
    m.call("dlogits", ["tangent", "logits"], 40, True)
    m.call("dlast", ["dlogits"], 10, True)
    gradients = []
    gather(layers - 1, "whole again", True)
    held = [name for name, *_ in backward if name != "late" and draw.random() < 0.4]
    for k in reversed(range(layers)):
        def place(name: str, k: int = k) -> str:
            if name == "after":
                return f"{k + 1}.g" if k + 1 < layers else "dlast"
            if name == "before":
                return f"{k - 1}.x" if k else "embedded"
            return name if name == "mask" else f"{k}.{name}"

        for number, (name, reads, nbytes, rest) in enumerate(backward):
            more = ["whole again"] if ahead and name == "g" else []
            if not number and at_once:
                gather(k - 1, "whole again", True)
            m.call(f"{k}.{name}", map(place, (*reads, *more)), nbytes, **{"backward": True, **rest}, block=f"l.{k}")
            if not number and not at_once:
                gather(k - 1, "whole again", True)
        gradients += [f"{k}.{name}" for name in held]
    m.call("dembedded", ["0.g"], 10, True)
    returned = ["loss", *([f"{k}.f0" for k in range(layers)] if seed % 4 == 3 else [])]
    return StorageProgram(tuple(m.runs), tuple(m.storages), frozenset(m.numbers[r] for r in returned),
                          frozenset(m.numbers[g] for g in [*gradients, "dembedded"]))

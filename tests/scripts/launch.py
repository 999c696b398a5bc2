"""Many uses to one launch; one that crashes or hangs costs the others only another launch."""
from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import tempfile
from pathlib import Path

import torch.distributed as dist

from tests.helpers.frozen import freeze
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.scripts.compare import Outcome, judge
from tests.scripts.use import FOUR_RANKS, find

RANKS = 2
os.environ.setdefault("HPML_QUICK_PROFILE", "0")  # what a plan costs does not matter here, and each use is a new session


Case = tuple[str, str]
"""Names of a use and of a mesh."""


def outcomes(folder: Path, cases: list[Case]) -> dict[Case, Outcome]:
    """The outcome of every case, by as many launches as it takes."""
    larger = [case for case in cases if case[1] in FOUR_RANKS]
    return _outcomes(folder, [case for case in cases if case not in larger], RANKS) | _outcomes(folder, larger, 2 * RANKS)


def _outcomes(folder: Path, cases: list[Case], ranks: int) -> dict[Case, Outcome]:
    found: dict[Case, Outcome] = {}
    while cases:
        here = Path(tempfile.mkdtemp(prefix="uses-", dir=folder))
        limit_s = 30 + sum(find(name).limit_s for name, _ in cases)
        log = "it ended without a word"
        try:
            run_ranks(here, run_uses, ranks, args=(cases, str(here)), timeout_s=limit_s)
        except RanksFailed as failure:
            log = str(failure)
        for number, case in enumerate(cases):
            parts = [read(here / f"{number}.{rank}") for rank in range(ranks)]
            if all(part is None for part in parts) and number:
                break
            found[case] = together(parts, log)
        cases = [case for case in cases if case not in found]
    return found


def run_uses(rank: int, cases: list[Case], folder: str) -> None:
    """What a rank does: the uses in turn, up to the first after which the ranks may not be in step."""
    for number, (name, mesh) in enumerate(cases):
        use = find(name)
        faulthandler.dump_traceback_later(use.limit_s, exit=True)  # one that hangs ends here, and says where
        freeze()  # what earlier uses left is neither looked through for this one's tensors nor mistaken for them
        outcome = judge(use, mesh, Path(folder, "files"), rank)
        faulthandler.cancel_dump_traceback_later()
        Path(folder, f"{number}.{rank}").write_bytes(pickle.dumps(outcome))
        if outcome.verdict == "crashed":
            return
        verdicts: list[str] = [""] * dist.get_world_size()
        with contextlib.suppress(RuntimeError):  # the peer is gone
            dist.all_gather_object(verdicts, outcome.verdict)
        if set(verdicts) != {outcome.verdict}:
            return


def read(path: Path) -> Outcome | None:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def together(parts: list[Outcome | None], log: str) -> Outcome:
    """The ranks' outcomes as one: that of all if they agree, to the last bit, and else what the worst of them says."""
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        words = "\n".join(f"rank {rank}: {part.verdict} {part.detail}" for rank, part in enumerate(parts) if part)
        return Outcome("crashed", f"not every rank came to an end\n{words}\n{log}")
    for verdict in ("different", "crashed"):
        worst = [part for part in there if part.verdict == verdict]
        if worst:
            return worst[0]
    if len({part.verdict for part in there}) > 1:
        return Outcome("crashed", "; ".join(f"rank {rank}: {part.verdict}" for rank, part in enumerate(there)))
    if len({part.digest for part in there}) > 1:
        return Outcome("different", "the ranks differ from each other in the last bits", there[0].seconds)
    return there[0]

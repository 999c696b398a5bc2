"""The pass that decides what is kept for backward."""
from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule

from passes.annotations import read, write
from passes.base import AnalysisPass
from passes.keeping.account import account
from passes.keeping.keep import TooSmall, keep
from passes.keeping.keys import CUT, KEPT, TAPE, KeptNodes
from passes.keeping.seam import NotAlike
from passes.keeping.unfold import counts_alike
from passes.keeping.walk import Walk
from passes.registry import register
from passes.solve.allowance import Allowance
from passes.solve.solvers import SolverOptions


@register
@dataclass(frozen=True)
class Keep(AnalysisPass):
    """Writes `KEPT`: the least time in which a call of the graph holds no more than `budget_bytes` besides its inputs, and
    leaves `between_bytes` of them to others while forward is over and backward is not begun, and `after_bytes` once it is over.

    strict: raise `TooSmall` where nothing fits; else what holds least of all that was tried is the answer. Raises `NotAlike`
    where a layer cannot stand for several. allowance: in place of the options' time limit.
    """

    name = "keep"
    requires = (TAPE, CUT)
    provides = (KEPT,)

    budget_bytes: float = float("inf")
    options: SolverOptions = SolverOptions()
    strict: bool = True
    between_bytes: int = 0
    after_bytes: int = 0
    allowance: Allowance | None = field(default=None, repr=False, compare=False)

    def run(self, graph_module: GraphModule) -> None:
        cut = read(CUT, graph_module)
        tape = replace(read(TAPE, graph_module), between_bytes=self.between_bytes, after_bytes=self.after_bytes)
        named = {storage.name: s for s, storage in enumerate(tape.storages)}
        suggested = frozenset(named[name] for name in cut if name in named) & frozenset(tape.candidates)
        start = time.perf_counter()
        try:
            walked = keep(tape, self.budget_bytes, self.options, [suggested], self.allowance).walk
        except TooSmall as error:
            if self.strict or error.walk is None:
                raise
            walked = error.walk
        if walked.tape.stand_ins and not counts_alike(walked):
            raise NotAlike
        write(KEPT, graph_module, kept_nodes(walked, self.budget_bytes, time.perf_counter() - start))


def kept_nodes(walked: Walk, budget_bytes: float, seconds: float) -> KeptNodes:
    """A walk in the words of an annotation."""
    tape = walked.tape
    return KeptNodes(
        frozenset(tape.storages[s].name for s in walked.kept), sum(tape.layers_again[k] for k in walked.again),
        sum(map(tape.us_of, walked.again)), max(walked.forward.nbytes, default=0), max(walked.backward.nbytes, default=0),
        tape.bytes_of(walked.kept - walked.offloaded | tape.returned), budget_bytes, seconds,
        frozenset(tape.storages[s].name for s in walked.offloaded), tape.bytes_of(walked.offloaded),
        sum(map(tape.offload_us_of, walked.offloaded)), account(walked), walked.after)


@register
@dataclass(frozen=True)
class AdoptKept(AnalysisPass):
    """Writes `KEPT` as it was decided elsewhere, of the same graph."""

    name = "adopt_kept"
    provides = (KEPT,)

    kept: KeptNodes = KeptNodes(frozenset(), 0, 0.0, 0, 0, 0, float("inf"), 0.0)

    def run(self, graph_module: GraphModule) -> None:
        write(KEPT, graph_module, self.kept)

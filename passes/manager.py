"""Run a sequence of passes after checking that each will find its required annotations."""
from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from passes import compat, registry
from passes.annotations import Key, has
from passes.base import AnalysisPass, Pass, PassError, TransformPass
from passes.pass_result import PassResult

_log = logging.getLogger("hpml")


@dataclass(frozen=True)
class PassManager:
    """A sequence of passes. Calling it runs them in order.

    Each result's summary is logged to the logger "hpml" at level INFO, its diff at level DEBUG.
    """

    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))
        for position, entry in enumerate(self.passes):
            if not isinstance(entry, Pass):
                step = f"write {entry.__name__}()" if isinstance(entry, type) else "pass instances of Pass"
                raise PassError(f"{entry!r} is not a pass", f"position {position + 1} of the sequence", step)

    def check(self, available: Iterable[Key[Any]] = ()) -> None:
        """Raise PassError listing every unmet requirement, and the pass that would provide it.

        available: annotations that are complete before the first pass. A transform counts as if it changed the graph:
        annotations that it does not preserve are dropped.
        """
        known = set(available)
        lost: dict[Key[Any], str] = {}
        problems = []
        for position, entry in enumerate(self.passes):
            for key in entry.requires:
                if key not in known:
                    remedy = self._remedy(key, position, lost)
                    problems.append(f"{position + 1}. {entry.name} requires {key.name!r}: {remedy}")
            if isinstance(entry, AnalysisPass):
                known.update(entry.provides)
            if isinstance(entry, TransformPass):
                lost.update({key: entry.name for key in known - set(entry.preserves)})
                known.intersection_update(entry.preserves)
        if problems:
            order = " -> ".join(entry.name for entry in self.passes)
            raise PassError("the sequence cannot run, nothing was run", order, f"\n{' ' * 13}".join(problems))

    def __call__(self, graph_module: fx.GraphModule) -> list[PassResult]:
        """Check, then run every pass on `graph_module`; their results in order.

        Errors name the passes that ran before: a PassError in `where`, any other exception in a note.
        """
        required = {key for entry in self.passes for key in entry.requires}
        self.check(key for key in required if has(key, graph_module))
        results = []
        for entry in self.passes:
            before = " -> ".join(result.pass_name for result in results) or "nothing"
            try:
                with compat.annotated(f"hpml pass {entry.name}"):
                    results.append(entry(graph_module))
            except PassError as error:
                raise PassError(error.what, f"{error.where}; before {entry.name!r} ran {before}", error.next_step) from error
            except Exception as error:
                note = f"in pass {entry.name!r}; before it ran {before}"
                vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), note]  # add_note, which Python 3.10 has not yet
                raise
            _log.info("%s", results[-1].summary())
            if _log.isEnabledFor(logging.DEBUG):  # the diff is only made when somebody reads it
                _log.debug("%s", results[-1].diff())
        return results

    def _remedy(self, key: Key[Any], position: int, lost: dict[Key[Any], str]) -> str:
        if key in lost:
            providers = " or ".join(map(repr, registry.providers(key))) or "its provider"
            return f"transform {lost[key]!r} does not preserve it; run {providers} again after it"
        later = [p.name for p in self.passes[position:] if isinstance(p, AnalysisPass) and key in p.provides]
        if later:
            return f"{later[0]!r} provides it but comes later; move it before"
        if found := registry.providers(key):
            return f"put {' or '.join(map(repr, found))} before it"
        return "no registered pass provides it"

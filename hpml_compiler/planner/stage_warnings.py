"""Warnings about graphs that are not pipelined, and about stages that save no memory."""
from __future__ import annotations

import logging

from passes.pipeline.stage_assignment import StageAssignment

log = logging.getLogger("hpml")
WITHOUT_STAGES = "use fewer ranks for pp or remove it from options['mesh'], and split the model by dp, tp or zero instead"
"""Remedy for a graph that is not pipelined."""


def warn_without_stages(name: str, why: str) -> None:
    """Warn that a graph is not pipelined though stages were asked for. name: of the graph."""
    log.warning("%s is not pipelined; every stage runs it in full: %s; %s", name, why, WITHOUT_STAGES)


def warn_of_empty_stages(name: str, stages: StageAssignment) -> None:
    """Warn of stages without parameters of their own, which save no memory. name: of the graph."""
    empty = stages.without_parameters()
    if not empty:
        return
    which = ", ".join(f"stage {stage} ({' to '.join(dict.fromkeys((own[0], own[-1])))})"
                      for stage in empty if (own := stages.blocks[stage]))
    log.warning("%s: of %d stages, %s has no parameters of its own, so it saves no memory; %s", name, stages.count, which,
                WITHOUT_STAGES)

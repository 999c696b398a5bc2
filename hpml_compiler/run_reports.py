"""`hpml_compiler.last_report` and `last_stages`: measured against predicted time and memory of the current run."""
from __future__ import annotations

from dataclasses import replace

from hpml_compiler.monitor.report import Report
from hpml_compiler.monitor.stage_monitor import STAGES_ARE_MEASURED, StagesReport
from hpml_compiler.runtime.outputs.loss_memory import LossMemories
from hpml_compiler.runtime.outputs.output_wrapper import OutputUses
from hpml_compiler.session import session
from hpml_compiler.visualize.description.describe_plan import loss_words
from passes.errors import BadInput
from passes.session_state import state_of


def last_report() -> Report:
    """This rank's latest comparison of predicted and measured step time and memory.

    Before the first comparison is due, it covers the steps so far. Of pipeline stages, it has the time of the loop
    (`last_stages` has the rest). Raises BadInput if there are none, or no plan.
    """
    monitor, stages = session.current().monitor, session.current().stages_report
    report = monitor.last_report() if monitor is not None else None
    report = stages.as_report() if report is None and stages is not None else report
    if report is None:
        raise BadInput("no training step was measured yet", "last_report",
                       "train for a few steps, on several ranks and without the option monitor=False")
    current = session.current()
    chunked = (f"{name}: the loss is computed {loss_words(found)}" for name, found in current.loss_chunks.items()
               if found.count > 1 or current.options.loss_chunks != "auto")
    return replace(report, losses=(*(line for each in state_of(LossMemories) if (line := each.described())), *chunked),
                   outputs=tuple(use.described() for use in state_of(OutputUses).values() if use.calls or use.made))


def last_stages() -> StagesReport:
    """Measured and predicted times of the pipeline stages, on all ranks; every rank has the same report.

    Raises BadInput before the first measurement, or if there are no stages.
    """
    report = session.current().stages_report
    if report is None:
        raise BadInput("no stages were measured yet", "last_stages", f"train for {STAGES_ARE_MEASURED} steps with pp in "
                       "options['mesh'], and without the option monitor=False")
    return report

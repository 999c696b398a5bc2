"""`hpml_compiler.last_report` and `last_stages`: what the run that goes on here takes, beside what was predicted."""
from __future__ import annotations

from hpml_compiler.monitor.report import Report
from hpml_compiler.monitor.stage_monitor import STAGES_ARE_MEASURED, StagesReport
from hpml_compiler.session import session
from passes.errors import BadInput


def last_report() -> Report:
    """This rank's last comparison of predicted with measured step time and memory.

    Before the first one is due, it is made of the steps until now. Raises BadInput if there are none, or no plan.
    """
    monitor = session.current().monitor
    report = monitor.last_report() if monitor is not None else None
    if report is None:
        raise BadInput("no training step was measured yet", "last_report",
                       "train for a few steps, on several ranks and without the option monitor=False")
    return report


def last_stages() -> StagesReport:
    """What the stages of the pipeline take, on all ranks, beside what they were predicted to; every rank has the same.

    Raises BadInput if it was not measured yet, or nothing goes through stages.
    """
    report = session.current().stages_report
    if report is None:
        raise BadInput("no stages were measured yet", "last_stages", f"train for {STAGES_ARE_MEASURED} steps with pp in "
                       "options['mesh'], and without the option monitor=False")
    return report

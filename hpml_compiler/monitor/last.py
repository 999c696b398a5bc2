"""`hpml_compiler.last_report`: what the run that goes on here takes, beside what was predicted."""
from __future__ import annotations

from hpml_compiler.compile import session
from hpml_compiler.monitor.report import Report
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

"""hpml: plan and run a model over many devices by changing one line, `torch.compile(model, backend="hpml")`.

Importing it imports nothing else: public names are loaded at their first use, since most of them need torch.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which do not see `_WHERE`
    from hpml_compiler.api import plan
    from hpml_compiler.checkpoints.checkpointer import Checkpointer
    from hpml_compiler.elastic.attempts import attempts
    from hpml_compiler.integrations.accelerate import one_device
    from hpml_compiler.plan_api.model_plan import Plan
    from hpml_compiler.run_recording.recorder import Monitor
    from hpml_compiler.run_reports import last_report, last_stages
    from hpml_compiler.runtime.batch.distributed_loader import distribute, distribute_batch
    from hpml_compiler.runtime.dtensor.state_dicts import full_state_dict
    from hpml_compiler.session.session import last_plan
    from hpml_compiler.session.session import reset_process as reset
    from hpml_compiler.weights.meta_models import initialize
    from hpml_compiler.weights.whole_weights import load, save

__all__ = ["Checkpointer", "Monitor", "Plan", "attempts", "distribute", "distribute_batch", "full_state_dict", "initialize",
           "last_plan",
           "last_report", "last_stages", "load", "one_device", "plan", "reset", "save"]

_WHERE = {
    "Checkpointer": "checkpoints.checkpointer.Checkpointer", "Monitor": "run_recording.recorder.Monitor",
    "Plan": "plan_api.model_plan.Plan",
    "attempts": "elastic.attempts.attempts",
    "distribute": "runtime.batch.distributed_loader.distribute",
    "distribute_batch": "runtime.batch.distributed_loader.distribute_batch",
    "full_state_dict": "runtime.dtensor.state_dicts.full_state_dict", "initialize": "weights.meta_models.initialize",
    "last_plan": "session.session.last_plan", "load": "weights.whole_weights.load", "save": "weights.whole_weights.save",
    "last_report": "run_reports.last_report", "last_stages": "run_reports.last_stages",
    "one_device": "integrations.accelerate.one_device", "plan": "api.plan", "reset": "session.session.reset_process",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _WHERE[name].rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

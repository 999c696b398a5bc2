"""hpml: plan and run a model over many devices by changing one line, `torch.compile(model, backend="hpml")`.

Importing it imports nothing else: each public name is loaded at its first use, since most of them need torch.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which do not see `_WHERE`
    from hpml_compiler.compile.session import last_plan
    from hpml_compiler.compile.session import start_afresh as reset
    from hpml_compiler.integrations.accelerate import one_device
    from hpml_compiler.loader import distribute, distribute_batch
    from hpml_compiler.monitor.last import last_report, last_stages
    from hpml_compiler.planning.api import plan
    from hpml_compiler.plans.plan import Plan
    from hpml_compiler.runtime.checkpoints import full_state_dict

__all__ = ["Plan", "distribute", "distribute_batch", "full_state_dict", "last_plan", "last_report", "last_stages",
           "one_device", "plan", "reset"]

_WHERE = {
    "Plan": "plans.plan.Plan", "distribute": "loader.distribute", "distribute_batch": "loader.distribute_batch",
    "full_state_dict": "runtime.checkpoints.full_state_dict", "last_plan": "compile.session.last_plan",
    "last_report": "monitor.last.last_report", "last_stages": "monitor.last.last_stages",
    "one_device": "integrations.accelerate.one_device", "plan": "planning.api.plan", "reset": "compile.session.start_afresh",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _WHERE[name].rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

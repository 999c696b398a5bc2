"""hpml: plan and run a model over many devices by changing one line, `torch.compile(model, backend="hpml")`."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Before the function `plan` below: importing the module of the same name later would replace it.
from hpml_compiler.plans.plan import Plan

if TYPE_CHECKING:
    from hpml_compiler.compile.session import start_afresh as reset
    from hpml_compiler.integrations.accelerate import one_device
    from hpml_compiler.loader import distribute, distribute_batch
    from hpml_compiler.mixed.plan import MixedPlan
    from hpml_compiler.monitor.last import last_report
    from hpml_compiler.planning.api import last_plan
    from hpml_compiler.runtime.checkpoints import full_state_dict

__all__ = ["Plan", "distribute", "distribute_batch", "full_state_dict", "last_plan", "last_report", "one_device", "plan",
           "reset"]


def plan(model: Any, batch: Any, cluster: Any = None, **options: Any) -> Plan | MixedPlan:
    """Plan one training step of `model` on `batch` for a cluster, without devices: see `hpml_compiler.planning.api.plan`."""
    from hpml_compiler.planning.api import plan as make

    return make(model, batch, cluster, **options)


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `hpml --help` shall not wait for it.
    if name in ("distribute", "distribute_batch"):
        from hpml_compiler import loader

        return getattr(loader, name)
    if name == "full_state_dict":
        from hpml_compiler.runtime.checkpoints import full_state_dict

        return full_state_dict
    if name == "last_plan":
        from hpml_compiler.planning.api import last_plan

        return last_plan
    if name == "reset":
        from hpml_compiler.compile.session import start_afresh

        return start_afresh
    if name == "last_report":
        from hpml_compiler.monitor.last import last_report

        return last_report
    if name == "one_device":
        from hpml_compiler.integrations.accelerate import one_device

        return one_device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

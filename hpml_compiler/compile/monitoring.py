"""The monitor of this process: one for all graphs that it compiles."""
from __future__ import annotations

import torch.distributed as dist

from hpml_compiler.compile import session
from hpml_compiler.monitor.energy import PowerMeter
from hpml_compiler.monitor.monitor import Monitor
from hpml_compiler.options import Options
from hpml_compiler.runtime.devices import device_type


def monitor_of(options: Options) -> Monitor:
    """This process's monitor, made with the options of the graph that is compiled first."""
    current = session.current()
    if current.monitor is None:
        speaks, kind = dist.get_rank() == 0, device_type()
        current.monitor = Monitor(kind, speaks=speaks, folder=options.tensorboard,
                                  power=PowerMeter.here(kind) if speaks else None)
    return current.monitor


def current_monitor() -> Monitor | None:
    return session.current().monitor

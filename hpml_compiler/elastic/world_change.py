"""Leave the process groups of one set of ranks, and form those of another, in the same process."""
from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from hpml_compiler.options import DefaultOptions
from hpml_compiler.run_recording.recorder import OpenMonitor
from hpml_compiler.runtime.process.world_group import form_process_group
from hpml_compiler.runtime.watchdog.heartbeat import LossNotice
from hpml_compiler.session import session
from passes import compat
from passes.session_state import state


def leave_world() -> None:
    """End the session and destroy all process groups. No other rank is waited for; their connections have been cut.

    Compiled models are compiled anew in their next call. What the script has set up stays: its monitor and default options.
    """
    kept = [part for part in (state.take(DefaultOptions), state.take(OpenMonitor), state.take(LossNotice)) if part is not None]
    session.current().close()
    compat.forget_interned_specs()
    if dist.is_initialized():
        dist.destroy_process_group()
    state.ended = 0  # names in the store begin with the generation, and are those of a process that has just started
    for part in kept:
        state.put(part)


def form_world(generation: int, rank: int, ranks: int, store: Any) -> None:
    """Form the process group of a generation, in which this process has this rank. All of its members call it, with a store of
    the generation alone."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                   "TORCHELASTIC_RESTART_COUNT": str(generation)}  # in the names of heartbeats
    if ranks > 1:
        form_process_group(store, rank, ranks)

"""Compile rank 0 of several in this process, without the others."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import hpml_compiler
from passes import compat


@contextlib.contextmanager
def rank_0_of(world: int) -> Iterator[None]:
    """The others say what it says. Nothing is computed by what communicates."""
    new_group = dist.new_group

    def gather(found: list[Any], mine: Any, **_: Any) -> None:
        found[:] = [mine] * len(found)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compat, "group_timeout", lambda _: timedelta(seconds=60)))
        stack.enter_context(mock.patch.object(compat, "collectives_begun", lambda _: 0))
        stack.enter_context(mock.patch.object(dist, "broadcast_object_list", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", gather))
        stack.enter_context(mock.patch.object(dist, "new_group", lambda *args, backend=None, **more: new_group(*args, **more)))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        hpml_compiler.reset()
        try:
            yield
        finally:
            hpml_compiler.reset()
            torch.compiler.reset()
            dist.destroy_process_group()

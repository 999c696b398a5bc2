"""Contexts around private torch APIs."""
from __future__ import annotations

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from passes import compat


def python_dispatcher_is_on() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)


def test_outside_tracing_tensors_are_real_and_the_python_dispatcher_is_off():
    """With the dispatcher on, a collective would be queued under the GIL, which gloo's thread may be waiting for."""
    with compat.tracing_fake_mode(), enable_python_dispatcher():
        assert isinstance(torch.ones(2), FakeTensor) and python_dispatcher_is_on()
        with compat.outside_tracing():
            assert not isinstance(torch.ones(2), FakeTensor) and not python_dispatcher_is_on()
        assert isinstance(torch.ones(2), FakeTensor) and python_dispatcher_is_on()

"""A thread makes the C++ compiler ready -> who compiles meanwhile waits until its flags are chosen, and no longer."""
from __future__ import annotations

import threading

import pytest
from torch._inductor import codecache, cpu_vec_isa

from passes.compat import wait_for_vector_instructions, warm_cpp_compiler


@pytest.mark.parametrize("fails", [False, True])
def test_flags_are_chosen_before_anything_is_compiled(fails, monkeypatch):
    may_choose, may_compile, done = threading.Event(), threading.Event(), []

    def choose():
        may_choose.wait(10)
        done.append("chosen")
        if fails:
            raise OSError("no compiler")

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", choose)
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding", lambda *_: may_compile.wait(10))
    warm_cpp_compiler.__wrapped__()
    waiting = threading.Thread(target=lambda: (wait_for_vector_instructions(), done.append("compiled")))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not done
    may_choose.set()
    waiting.join(10)
    assert done == ["chosen", "compiled"]
    may_compile.set()

"""A thread makes the C++ compiler ready -> who compiles meanwhile waits until its flags are chosen, and no longer."""
from __future__ import annotations

import functools
import threading

import pytest
from torch._inductor import codecache, cpu_vec_isa

from passes.compat import wait_for_vector_instructions, warm_cpp_compiler
from passes.compat.codegen import cpp_warmup
from passes.session_state import state


@pytest.mark.parametrize("fails", [False, True])
def test_flags_are_chosen_before_anything_is_compiled(fails, monkeypatch):
    may_choose, may_compile, done = threading.Event(), threading.Event(), []

    def choose():
        may_choose.wait(10)
        done.append("chosen")
        if fails:
            raise OSError("no compiler")

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", choose)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", cpu_vec_isa.valid_vec_isa_list)  # which is put back afterwards
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding", lambda *_: may_compile.wait(10))
    state.close()
    warm_cpp_compiler()
    waiting = threading.Thread(target=lambda: (wait_for_vector_instructions(), done.append("compiled")))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not done
    may_choose.set()
    waiting.join(10)
    assert done == ["chosen", "compiled"]
    may_compile.set()


def test_only_the_vector_instructions_that_are_taken_are_tried(monkeypatch):
    class Instructions:
        def __init__(self, name: str, works: bool) -> None:
            self.name, self.works = name, works

        def __str__(self) -> str:
            return self.name

        def __bool__(self) -> bool:
            tried.append(self.name)
            return self.works

    tried: list[str] = []
    known = [Instructions(name, name != "broken") for name in ("absent", "broken", "first", "second")]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", known)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["broken", "first", "second"])
    valid = cpp_warmup._FirstVectorIsa(functools.cache(lambda: [known[2], known[3]]))
    assert valid and valid[0] is known[2]
    assert tried == ["broken", "first"]
    assert [*valid] == known[2:] and valid[1] is known[3]

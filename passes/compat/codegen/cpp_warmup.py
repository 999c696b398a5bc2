"""Warm up the C++ compiler behind inductor on CPUs while a graph is still being traced."""
from __future__ import annotations

import functools
import logging
import platform
import sys
import threading
from collections.abc import Iterator
from typing import Any

from passes.compat.patching.patches import replace_for_good
from passes.session_state import state, state_of


def warm_cpp_compiler() -> None:
    """Run in the background, once in a session, inductor's preparation for its first C++ kernel: it tries the vector
    instructions and checks, or compiles, its header. With cold caches that is several seconds of waiting for a
    compiler in subprocesses, while nothing is ready for lowering yet."""
    state_of(_CppWarmup)


class _CppWarmup:
    """chosen: set once the thread has chosen the vector instructions."""

    def __init__(self) -> None:
        _try_only_what_is_asked_for()
        self.chosen = threading.Event()
        self.thread = threading.Thread(target=self._compile_least_kernel, name="hpml-warm-cpp", daemon=True)
        self.thread.start()

    def _compile_least_kernel(self) -> None:
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        try:
            try:
                pick_vec_isa()
            finally:
                self.chosen.set()
            # torch 2.13 recognizes by the comment that the kernel needs vector instructions.
            CppPythonBindingsCodeCache.load_pybinding(["float*"], 'extern "C" void kernel(float* x) {}  // at::vec::\n')
        except Exception as error:  # inductor meets the same at its first kernel, and its error is the user's
            logging.getLogger("hpml").debug("The C++ compiler could not be warmed: %s", error)

    def close(self) -> None:
        self.thread.join()


def wait_for_vector_instructions() -> None:
    """Wait until the thread of `warm_cpp_compiler` has chosen them, if it was started. While torch tries them, its compiler
    flags are temporarily others: a second thread that reads them then compiles for instructions that no other process
    uses, and nobody finds its code again."""
    if state.has(_CppWarmup):
        state_of(_CppWarmup).chosen.wait()


@functools.cache
def _try_only_what_is_asked_for() -> None:
    """Inductor compiles and loads a test for each set of vector instructions of the processor, and takes the
    first that works. With this patch the others are tried only on demand."""
    from torch._inductor import cpu_vec_isa

    names = ("valid_vec_isa_list", "supported_vec_isa_list", "x86_isa_checker")
    if sys.platform == "linux" and platform.machine() == "x86_64" and all(hasattr(cpu_vec_isa, name) for name in names):
        replace_for_good({"valid_vec_isa_list": lambda all_of: functools.cache(functools.partial(_FirstVectorIsa, all_of))})


class _FirstVectorIsa:
    """Lazy list of `all_of`, whose first element is found alone."""

    def __init__(self, all_of: Any) -> None:
        self.all_of = all_of

    @functools.cached_property
    def first(self) -> Any:
        from torch._inductor import cpu_vec_isa

        here = cpu_vec_isa.x86_isa_checker()
        return next((each for each in cpu_vec_isa.supported_vec_isa_list
                     if all(flag in here for flag in str(each).split()) and each), None)

    def __bool__(self) -> bool:
        return self.first is not None

    def __getitem__(self, place: int) -> Any:
        return self.first if place == 0 and self else self.all_of()[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.all_of())

"""The C++ compiler behind inductor on CPUs: made ready while a graph is still being traced."""
from __future__ import annotations

import functools
import logging
import platform
import sys
import threading
from collections.abc import Iterator
from typing import Any

from passes.compat.patching.patches import replace_for_good

_chosen = threading.Event()
_chosen.set()


@functools.cache
def warm_cpp_compiler() -> None:
    """Begin in the background, once in a process, what inductor does before its first C++ kernel: it tries the vector
    instructions and looks over, or compiles, its header. With cold caches that is several seconds of waiting for a
    compiler in subprocesses, while nothing is there to lower yet."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    _try_only_what_is_asked_for()

    def compile_least_kernel() -> None:
        try:
            try:
                pick_vec_isa()
            finally:
                _chosen.set()
            # By the comment torch 2.13 knows what needs vector instructions.
            CppPythonBindingsCodeCache.load_pybinding(["float*"], 'extern "C" void kernel(float* x) {}  // at::vec::\n')
        except Exception as error:  # inductor meets the same at its first kernel, and its error is the user's
            logging.getLogger("hpml").debug("The C++ compiler could not be warmed: %s", error)

    _chosen.clear()
    threading.Thread(target=compile_least_kernel, name="hpml-warm-cpp", daemon=True).start()


def wait_for_vector_instructions() -> None:
    """Until the thread of `warm_cpp_compiler` has chosen them, if it has begun. While torch tries them, the flags of its
    compiler are others for a moment: a second thread that reads them then compiles for instructions that no other process
    compiles for, and whose code none finds again."""
    _chosen.wait()


def _try_only_what_is_asked_for() -> None:
    """Inductor compiles and loads a piece of code for each set of vector instructions that the processor has, and takes the
    first that works. The others are tried only where somebody wants them."""
    from torch._inductor import cpu_vec_isa

    names = ("valid_vec_isa_list", "supported_vec_isa_list", "x86_isa_checker")
    if sys.platform == "linux" and platform.machine() == "x86_64" and all(hasattr(cpu_vec_isa, name) for name in names):
        replace_for_good({"valid_vec_isa_list": lambda all_of: functools.cache(functools.partial(_FirstVectorIsa, all_of))})


class _FirstVectorIsa:
    """The list that `all_of` makes, of which the first is found alone."""

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

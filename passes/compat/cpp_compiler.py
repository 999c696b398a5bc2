"""The C++ compiler behind inductor on CPUs: made ready while a graph is still being traced."""
from __future__ import annotations

import functools
import logging
import threading

_chosen = threading.Event()
_chosen.set()


@functools.cache
def warm_cpp_compiler() -> None:
    """Begin in the background, once in a process, what inductor does before its first C++ kernel: it tries the vector
    instructions and looks over, or compiles, its header. With cold caches that is several seconds of waiting for a
    compiler in subprocesses, while nothing is there to lower yet."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpu_vec_isa import pick_vec_isa

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

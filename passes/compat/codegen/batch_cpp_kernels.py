"""Compile inductor's C++ kernels of one graph in batches, and wait for them together.

Two thirds of g++'s time for one kernel are overhead: starting, reading inductor's header, linking. Inductor starts
it for each; here, kernels of a graph share a few runs: half as many as there are compile threads, which other graphs
and ranks use, too, or more where each would have many kernels. The assignment of kernels to runs follows from the graph's code
and the machine alone, so that every process finds the same libraries.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from passes.compat.codegen.cut_off_libraries import loaded
from passes.compat.patching.patches import replaced
from passes.session_state import state_of

log = logging.getLogger("hpml")
MOST_KERNELS = 8
"""Kernels per library: beyond it, the rest is worth a run of its own."""
_FIELDS = {"arg_len", "call_entry_func", "entry_func", "extra_parse_arg"}
_NAME = re.compile(r"\bkernel\s*\(")
_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)


@dataclass
class _DeferredGraphs:
    """unfinished: inductor's compilers of graphs with the names that their kernels get, for which nothing has waited yet; None
    outside of the context. gathered: kernels requested so far, by the id of the compiler of a graph's code."""

    unfinished: list[tuple[Any, dict[str, Any]]] | None = None
    gathered: dict[int, list[_DeferredKernel]] = field(default_factory=dict)


@contextlib.contextmanager
def deferred_cpp_kernels() -> Any:
    """Context in which C++ kernels are compiled in the background: the results may be called after its end, which waits for the
    compiler. Without it, inductor would wait for the kernels of each graph before it begins the next. Nested contexts wait at
    the end of the outermost."""
    deferred = state_of(_DeferredGraphs)
    if deferred.unfinished is not None:
        yield
        return
    deferred.unfinished = unfinished = []
    try:
        with replaced({"AsyncCompile.wait": lambda _: _begin, "AsyncCompile.cpp_pybinding": _gathering}):
            yield
    finally:
        deferred.unfinished = None
        deferred.gathered.clear()
    for compiling, scope in unfinished:
        for name, value in scope.items():
            # for which inductor waits only if it has threads
            if isinstance(getattr(value, "result_fn", None), _DeferredKernel):
                scope[name] = value.result()
        compiling.wait(scope)


def _begin(self: Any, scope: dict[str, Any]) -> None:
    """Replaces the wait for the kernels of a graph's code."""
    deferred = state_of(_DeferredGraphs)
    assert deferred.unfinished is not None, "inductor waits inside of the context"
    _compile(deferred.gathered.pop(id(self), []), self.submit)
    deferred.unfinished.append((self, scope))


def _gathering(alone: Callable[..., Any]) -> Callable[..., Any]:
    """alone: compiles a kernel by itself."""
    def gather(self: Any, argtypes: list[str], source_code: str, *more: Any, **named: Any) -> Any:
        if more or named or not _can_share(source_code):
            return alone(self, argtypes, source_code, *more, **named)
        kernel = _DeferredKernel(tuple(argtypes), source_code, lambda: alone(self, argtypes, source_code))
        state_of(_DeferredGraphs).gathered.setdefault(id(self), []).append(kernel)
        return kernel.future()

    return gather


@dataclass
class _DeferredKernel:
    """A kernel that is loaded on its first call. argtypes: C++ types of its arguments. alone: compiles it by itself. call:
    loads it, once its compilation has started."""

    argtypes: tuple[str, ...]
    code: str
    alone: Callable[[], Any]
    call: Callable[[], Any] | None = None

    def future(self) -> Any:
        from torch._inductor.codecache import LambdaFuture

        return LambdaFuture(self)

    def __call__(self) -> Any:
        assert self.call is not None, "the end of a graph's code begins to compile its kernels"
        return self.call()


def _can_share(code: str) -> bool:
    """True if a kernel has inductor's standard form, which the shared library requires."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    fields = {field for _, field, _, _ in string.Formatter().parse(Cache.suffix_template) if field}
    return (fields == _FIELDS and Cache.entry_function == "kernel" and len(_NAME.findall(code)) == 1
            and len(_NAME.findall(Cache.call_entry_function)) == 1)


def _compile(kernels: Sequence[_DeferredKernel], submit: Callable[..., Any]) -> None:
    """Start compiling."""
    from torch._inductor.async_compile import get_compile_threads

    runs = max(get_compile_threads() // 2, -(-len(kernels) // MOST_KERNELS))
    for first in range(min(runs, len(kernels))):
        _KernelLibrary(kernels[first::runs], submit).begin()


class _KernelLibrary:
    """Kernels of one run of the compiler."""

    def __init__(self, kernels: Sequence[_DeferredKernel], submit: Callable[..., Any]):
        self.kernels, self.submit = kernels, submit

    def begin(self) -> None:
        from torch._inductor.async_compile import get_compile_threads
        from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

        # Compiled where another process is at it already, it is waited for: by a thread, so that this one goes on.
        self.load = functools.partial(loaded, Cache.load_async(self.source()))
        self.loading = self.submit(self.load) if get_compile_threads() > 1 else None
        for number, kernel in enumerate(self.kernels):
            kernel.call = functools.partial(self.kernel, number)

    def kernel(self, number: int) -> Any:
        from torch._inductor.exc import CppCompileError

        try:
            first = self.load() if self.loading is None else self.loading.result()
        except CppCompileError as error:  # if it is a kernel's own, the user meets it with that kernel alone
            log.info("%d kernels that could not be compiled together are compiled one by one: %s", len(self.kernels), error)
            made = self.kernels[number].alone()
            return made.result() if hasattr(made, "result") else made
        return getattr(_module(first, number), _entry(number))

    def source(self) -> str:
        """C++ source with each kernel in a namespace, its bindings, and an entry that Python can import by its name."""
        includes = dict.fromkeys(line.strip() for kernel in self.kernels for line in _INCLUDE.findall(kernel.code))
        parts = [_NAME.sub(f"{_entry(number)}(", _INCLUDE.sub("", kernel.code)) + _bindings(kernel, number)
                 for number, kernel in enumerate(self.kernels)]
        bindings = dict.fromkeys(line.strip() for part in parts for line in _INCLUDE.findall(part))
        spaces = [f"namespace hpml_{number} {{\n{_INCLUDE.sub('', part)}\n}}\n" for number, part in enumerate(parts)]
        return "\n".join(["#define PY_SSIZE_T_CLEAN", *includes, *bindings, *spaces])


def _entry(number: int) -> str:
    return f"kernel_{number}" if number else "kernel"  # inductor loads the first one by this name


def _bindings(kernel: _DeferredKernel, number: int) -> str:
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    arguments = ", ".join(f"parse_arg<{each.replace('const ', '')}>(args, {n})" for n, each in enumerate(kernel.argtypes))
    call = _NAME.sub(f"{_entry(number)}(", Cache.call_entry_function).format(arguments)
    return Cache.suffix_template.format(arg_len=len(kernel.argtypes), call_entry_func=call, entry_func=_entry(number),
                                        extra_parse_arg=Cache.extra_parse_arg.format(array_len=-1))


def _module(first: ModuleType, number: int) -> ModuleType:
    """One library is one Python module for each of its kernels."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    if number == 0:
        return first
    path, key = str(first.__file__), first.__name__.rpartition(".")[0]

    class Entry(Cache):
        entry_function = _entry(number)

    return Entry._load_library_inner(path, key)

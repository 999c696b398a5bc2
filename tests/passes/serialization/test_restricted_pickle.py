"""Pickles in which something hides that runs -> refused before it does; data of the expected classes -> the same data."""
from __future__ import annotations

import enum
import functools
import io
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard

from passes.hardware.cluster import Cluster
from passes.json_records import FrozenMap
from passes.pipeline.stage_assignment import StageAssignment
from passes.serialization import restricted_pickle, serialized_graph
from passes.serialization.restricted_pickle import NotPlain, classes_of, dumps, loads
from passes.serialization.serialized_calls import CannotSerialize, SerializedFunction, SerializedOperator
from passes.serialization.serialized_graph import check, pack, unpack

CLASSES = classes_of(Cluster, StageAssignment)


class Called:
    """Pickles as a call of what its name says, with these arguments."""

    def __init__(self, function: Any, *arguments: Any):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def by_name(module: str, name: str, *arguments: Any) -> bytes:
    """A call of module.name, which need not be what pickle would find: pickle writes names without looking."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dump(arguments)
    given = file.getvalue()[2 + 9:-1] if file.getvalue()[2:3] == b"\x95" else file.getvalue()[2:-1]

    def text(x: str) -> bytes:
        return b"\x8c" + bytes([len(x)]) + x.encode()
    return b"\x80\x05" + text(module) + text(name) + b"\x93" + given + b"R."


@pytest.mark.parametrize("function", [
    os.system, subprocess.check_output, eval, exec, getattr, __import__, pickle.loads, torch.load, torch.ops.load_library,
    functools.partial, torch.storage._load_from_bytes, unpack, Called, open, torch.tensor, torch._utils._rebuild_tensor_v2,
    torch.nn.Module, torch.fx.GraphModule, torch.fx._symbolic_trace.symbolic_trace, str, type, object, bytearray],
    ids=lambda function: getattr(function, "__qualname__", str(function)))
def test_a_call_of_anything_else_is_refused(function):
    try:
        packed = pickle.dumps(Called(function, "touch /nowhere"), protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):  # what pickle itself does not write
        packed = by_name(function.__module__, function.__qualname__, "touch /nowhere")
    with pytest.raises(NotPlain, match="none of the classes"):
        loads(packed, CLASSES)
    with pytest.raises(NotPlain, match="none of the classes"):
        unpack(packed, FakeTensorMode(), Cluster)


@pytest.mark.parametrize(("module", "name"), [
    ("passes.serialization.serialized_graph", "pickle.loads"), ("passes.hardware.cluster", "Cluster.__init__"),
    ("hpml_compiler.compile.cache.graph_cache", "Earlier"), ("hpml_compiler.compile.cache.graph_cache", "torch.load"),
    ("passes.serialization.restricted_pickle", "constant.__globals__"), ("passes.serialization.restricted_pickle", "Unpickler"),
    ("posix", "system"),
    ("torch", "ops.load_library"), ("copyreg", "_reconstructor"), ("hpml_compiler.cli_target", "load"),
    ("__main__", "Cluster")])
def test_names_lead_nowhere_else(module, name):
    with pytest.raises(NotPlain, match="none of the classes"):
        loads(by_name(module, name, "x"), CLASSES)


@pytest.mark.parametrize("name", ["load", "nn", "__builtins__", "no such"])
def test_torchs_constants_are_constants(name):
    with pytest.raises(NotPlain, match="no dtype"):
        loads(by_name("passes.serialization.restricted_pickle", "constant", name), CLASSES)
    assert loads(by_name("passes.serialization.restricted_pickle", "constant", "bfloat16"), CLASSES) is torch.bfloat16


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Inner:
    color: Color
    number: complex


@dataclass(frozen=True)
class Outer:
    inner: Mapping[str, tuple[Inner, ...] | None]
    frozen: FrozenMap[int, Inner]
    rest: Any = None


@dataclass
class Works:
    """Not frozen: it may do anything when it is made."""


def test_data_comes_back(monkeypatch):
    monkeypatch.setattr(restricted_pickle, "OUR_PACKAGES", ("hpml_compiler", "passes", "tests"))
    inner = Inner(Color.RED, 1j)
    tensors = [torch.arange(6.0, dtype=dtype).reshape(2, 3).t() for dtype in (torch.bfloat16, torch.float64, torch.int64)]
    tensors += [torch.tensor(True), torch.empty(0, 3), torch.tensor([1 + 2j]).conj()]
    rest = [torch.float8_e4m3fn, torch.strided, torch.channels_last, torch.device("cpu", 0), torch.Size([1, 2]), Shard(1),
            Replicate(), frozenset({1}), slice(1, None), range(3), float("nan"), b"bytes", None, ...]
    outer = Outer({"x": (inner,), "y": None}, FrozenMap({1: inner}), rest)
    again, more, meta = loads(dumps((outer, tensors, torch.empty_strided((2, 3), (1, 2), device="meta"))), classes_of(Outer))
    assert (again.inner, again.frozen, repr(again.rest)) == (outer.inner, outer.frozen, repr(rest))
    for before, after in zip(tensors, more, strict=True):
        assert torch.equal(before, after) and (before.stride(), before.dtype) == (after.stride(), after.dtype)
    assert meta.device.type == "meta" and meta.stride() == (1, 2)
    with pytest.raises(NotPlain, match="Works is none of"):
        loads(dumps(Outer({}, FrozenMap(), Works())), classes_of(Outer))
    assert (Works.__module__, "Works") not in classes_of(Outer, tuple[Works, ...])


def graph_of(*nodes: tuple, constants: Mapping[str, Any] | None = None) -> bytes:
    """What `pack` would have written of a graph of these: (kind, name, what it calls, arguments, keyword arguments)."""
    stored = serialized_graph._SerializedGraph([(*node, None, {}) for node in nodes], dict(constants or {}))
    file = io.BytesIO()

    class Writer(serialized_graph._GraphPickler):
        def reducer_override(self, obj: Any) -> Any:
            return (serialized_graph._graph, (serialized_graph._HERE,
                                              stored)) if obj is stored_here else super().reducer_override(obj)
    stored_here = Called(None)
    Writer(file, ()).dump(stored_here)
    return file.getvalue()


X = ("placeholder", "x", "x", (), {})
ADD = SerializedOperator("aten::add.Tensor")
HOSTILE = {
    "a default that runs": [("placeholder", "x", "x=__import__('os').system('false')", (), {})],
    "a name that runs": [X, ("call_function", "y = eval('1')", ADD, (), {})],
    "a keyword that runs": [X, ("call_function", "y", ADD, (), {"alpha=eval('1'), alpha": 1})],
    "a keyword inside": [X, ("call_function", "y", ADD, ({"__import__('os')": 1},), {})],
    "a method": [X, ("call_method", "y", "__reduce__", (), {})],
    "a module": [X, ("call_module", "y", "x", (), {})],
    "an attribute that is no constant": [("get_attr", "y", "forward", (), {})],
    "eval": [X, ("call_function", "y", SerializedFunction("builtins.eval"), ("1",), {})],
    "getattr": [X, ("call_function", "y", SerializedFunction("builtins.getattr"), (1, "real"), {})],
    "torch.load": [X, ("call_function", "y", SerializedFunction("torch.load"), ("/nowhere",), {})],
    "methodcaller": [X, ("call_function", "y", SerializedFunction("operator.methodcaller"), ("x",), {})],
    "a function by its text": [X, ("call_function", "y", "os.system", ("false",), {})],
    "a library": [X, ("call_function", "y", SerializedOperator("load_library::__call__.__call__"), ("/nowhere.so",), {})],
    "a module of Python": [X, ("call_function", "y", SerializedOperator("import_module::__func__"), ("antigravity",), {})],
    "a file": [X, ("call_function", "y", SerializedOperator("aten::from_file"), ("/nowhere", True, 1), {})],
    "a packet": [X, ("call_function", "y", SerializedOperator("aten::add.overloads"), (), {})],
    "no such operator": [X, ("call_function", "y", SerializedOperator("nowhere::add"), (), {})],
    "a class among arguments": [X, ("call_function", "y", ADD, (SerializedOperator,), {})],
    "data among arguments": [X, ("call_function", "y", ADD, ([SerializedOperator("x")],), {})],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_graph_calls_operators_on_data_and_nothing_else(name):
    packed = graph_of(*HOSTILE[name])
    for read in (lambda: check(packed), lambda: unpack(packed, FakeTensorMode())):
        with pytest.raises(NotPlain):
            read()


def test_a_graph_that_is_none_of_these_is_read():
    first, second, third = map(serialized_graph._NodeReference, range(3))
    packed = graph_of(X, ("get_attr", "c", "c", (), {}), ("call_function", "y", ADD, (first, second), {"alpha": 2}),
                      ("call_function", "z", SerializedOperator("aten::__and__.Scalar"), (third, 1), {}),
                      ("output", "output", "output", ((third,),), {}), constants={"c": torch.tensor(3)})
    check(packed)
    assert unpack(packed, FakeTensorMode())(torch.tensor(1)) == (torch.tensor(7),)


@pytest.mark.parametrize("what", [torch.sin, len, os.system, torch.nn.functional.linear])
def test_what_would_not_be_read_is_not_written(what):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(what, (x,)),))
    with pytest.raises(CannotSerialize, match="a call of"):
        pack(torch.fx.GraphModule(torch.nn.Module(), graph))


def test_bytes_that_were_changed_raise_nothing_else():
    """Of 400 changes, none runs anything, and none raises what nobody expects."""
    running = {1: (torch.float32, torch.ones(2))}
    packed = dumps((Cluster.local(2, "cpu"), running, frozenset({1})))
    seen, watching, draw = set[str](), [True], random.Random(0)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if watching:
            seen.add(event)
    sys.addaudithook(audit)
    refused = 0
    for _ in range(400):
        changed = bytearray(packed)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        try:
            loads(bytes(changed), CLASSES)
        except (NotPlain, MemoryError):
            refused += 1
    watching.clear()
    assert refused > 100
    assert not seen & {"exec", "compile", "import", "open", "os.system", "subprocess.Popen"}, seen

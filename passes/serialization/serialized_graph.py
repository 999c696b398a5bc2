"""Serialize graphs of aten calls for a later process, which compiles them like this one.

Stored is all that compilation reads: calls with their arguments, names, and for each value its shape, strides, dtype, device
and storage. Values that share a storage share it again, also across graphs packed together, since that decides which memory
backward may reuse. Source locations in the script are stored only for graphs that are still to be
planned, `TRACED_META`.
"""
from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from passes.compat import LOOP_TURN, fake_of, is_fake, static_int
from passes.graph.user_checkpointing import CHECKPOINTED
from passes.pass_result import attribute_of
from passes.serialization.restricted_pickle import Classes, NotPlain, RestrictedPickler, RestrictedUnpickler, classes_of
from passes.serialization.serialized_calls import PARTS, CannotSerialize, called, own_name, packed_target

KEPT_META = ("partitioner_tag", LOOP_TURN)
_MODULES_OF_NODE = "nn_module_stack"
TRACED_META = (*KEPT_META, "desc", "seq_nr", "is_gradient_acc", _MODULES_OF_NODE, *CHECKPOINTED)
"""Metadata that annotating a traced graph reads besides its values."""
LARGEST_CONSTANT_BYTES = 2**20
_CONSTANTS = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None),
              type(...))
@dataclass(frozen=True)
class _NodeReference:
    """An argument that is another node: its index."""

    number: int


@dataclass(frozen=True)
class _TensorRecord:
    """A tensor value of a node. memory: index of its storage, of so many bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    memory: int
    nbytes: int


@dataclass(frozen=True)
class _SerializedGraph:
    nodes: list[tuple[str, str, Any, Any, Any, Any, Any]]
    constants: dict[str, torch.Tensor]


def pack(what: Any, meta: Sequence[str] = KEPT_META) -> bytes:
    """Serialize a graph, or data with graphs and fake tensors in it. meta: metadata stored for each node besides its value.

    Raises CannotSerialize for calls of anything but torch's operators, sizes that are not numbers, large constants and graphs
    inside of graphs."""
    file = io.BytesIO()
    try:
        _GraphPickler(file, meta).dump(what)
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # raised by pickle for unsupported objects
        raise CannotSerialize(str(error)) from error
    return file.getvalue()


def unpack(packed: bytes, mode: Any, *roots: Any) -> Any:
    """Deserialize; call it outside fake tensor modes. mode: the fake mode of the new values. roots: classes of the packed data,
    besides graphs and containers.

    Raises CannotSerialize if an operator is unknown in this process, NotPlain for anything that `pack` does
    not write: the code executed afterwards consists of calls of operators on data, and nothing else.
    """
    return _GraphUnpickler(io.BytesIO(packed), mode, classes_of(*roots)).load()


def check(packed: bytes, *roots: Any) -> None:
    """Raise NotPlain or CannotSerialize if `unpack` would. Builds no graphs, and may be called at any time."""
    nothing = {_key(_graph): lambda _, stored: [*_calls(stored)] and None, _key(_value): lambda *_: None}
    _GraphUnpickler(io.BytesIO(packed), None, {**classes_of(*roots), **nothing}).load()


class _GraphPickler(RestrictedPickler):
    """Pickles graphs and fake tensors as data from which `_FakeStorages` rebuilds them."""

    def __init__(self, file: io.BytesIO, meta: Sequence[str]):
        super().__init__(file)
        self.meta, self.memories = meta, dict[int, int]()

    def persistent_id(self, obj: Any) -> str | None:
        return "memory" if obj is _HERE else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, GraphModule):
            return _graph, (_HERE, _packed(obj, self.memories, self.meta))
        if isinstance(obj, torch.Tensor) and type(obj) is not torch.Tensor:
            return _value, (_HERE, _described(obj, self.memories))
        if isinstance(obj, torch.SymInt):
            return int, (_described(obj, self.memories),)
        return super().reducer_override(obj)


class _GraphUnpickler(RestrictedUnpickler):
    def __init__(self, file: io.BytesIO, mode: Any, classes: Classes):
        super().__init__(file, {**{_key(each): each for each in (_graph, _value, _SerializedGraph, _TensorRecord,
                                                                 _NodeReference, *PARTS)}, **classes})
        self.memory = _FakeStorages(mode)

    def persistent_load(self, pid: Any) -> _FakeStorages:
        return self.memory


_HERE = object()
"""Placeholder for the storages of the process that unpacks."""


def _packed(gm: GraphModule, memories: dict[int, int], kept: Sequence[str]) -> _SerializedGraph:
    numbers = {node: k for k, node in enumerate(gm.graph.nodes)}
    constants: dict[str, torch.Tensor] = {}
    nodes = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            constants[str(node.target)] = _constant(gm, node)
        args, kwargs = (map_aggregate(given, lambda x: _argument(x, numbers)) for given in (node.args, node.kwargs))
        value = _described(node.meta.get("val"), memories)
        meta = {key: node.meta[key] for key in kept if key in node.meta}
        if _MODULES_OF_NODE in meta:
            meta[_MODULES_OF_NODE] = _by_names(meta[_MODULES_OF_NODE])
        nodes.append((node.op, node.name, packed_target(node), args, dict(kwargs), value, meta))
    return _SerializedGraph(nodes, constants)


def _key(what: Any) -> tuple[str, str]:
    return what.__module__, what.__qualname__


def _by_names(stack: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, str]]:
    """Classes of modules may be a script's own, which another process does not find by name."""
    return {key: (path, f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else str(kind))
            for key, (path, kind) in stack.items()}


def _value(memory: _FakeStorages, value: _TensorRecord) -> torch.Tensor:
    return memory.value(value)


def _calls(stored: _SerializedGraph) -> Iterator[tuple[str, str, Any, Any, dict[str, Any]]]:
    """(kind, name, target, arguments, keyword arguments) of each node. Raises NotPlain or CannotSerialize."""
    for op, name, target, args, kwargs, *_ in stored.nodes:
        yield (op, own_name(name), called(op, target, stored.constants), _plain(tuple(args)),
               {own_name(key): _plain(x) for key, x in kwargs.items()})


def _graph(memory: _FakeStorages, stored: _SerializedGraph) -> GraphModule:
    graph, nodes = Graph(), list[Node]()
    for (op, name, target, args, kwargs), (*_, value, meta) in zip(_calls(stored), stored.nodes, strict=True):
        given: Any = map_aggregate((args, kwargs), lambda x: nodes[x.number] if type(x) is _NodeReference else x)
        node = graph.create_node(op, target, given[0], given[1], name)
        if node.name != name:
            raise CannotSerialize(f"node {name} cannot have this name again")
        node.meta.update(meta)
        if op != "output":
            node.meta["val"] = memory.value(value)
        nodes.append(node)
    root = torch.nn.Module()
    for name, tensor in stored.constants.items():
        root.register_buffer(name, tensor)
    return GraphModule(root, graph)


def bare(gm: GraphModule) -> GraphModule:
    """The same graph in a module that has only its constants: caches of compiled code hash all attributes of a module, in
    order."""
    graph, new = Graph(), {}
    result = graph.graph_copy(gm.graph, new)
    graph.output(result).meta.update(gm.graph.output_node().meta)
    root = torch.nn.Module()
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute_of(gm, node)
        if isinstance(value, torch.Tensor) and "." not in str(node.target):
            root.register_buffer(str(node.target), value)
        else:
            return gm
    return GraphModule(root, graph)


class _FakeStorages:
    """Makes fake tensors: those that shared a storage share one again."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.made: dict[int, torch.Tensor] = {}

    def value(self, x: Any) -> Any:
        return self._tensor(x) if isinstance(x, _TensorRecord) else [*map(self.value, x)] if isinstance(x, list) else (
            tuple(map(self.value, x)) if isinstance(x, tuple) else x)

    def _tensor(self, value: _TensorRecord) -> torch.Tensor:
        if value.memory not in self.made:
            self.made[value.memory] = torch.empty(value.nbytes, dtype=torch.uint8, device="meta")
        memory = self.made[value.memory].view(value.dtype).as_strided(value.shape, value.strides, value.offset)
        return fake_of(memory.requires_grad_(value.requires_grad), self.mode, value.device)


def _described(value: Any, memories: dict[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_described(x, memories) for x in value)
    if not isinstance(value, torch.Tensor):
        if isinstance(value, _CONSTANTS):
            return value
        if isinstance(value, torch.SymInt) and (number := static_int(value)) is not None:
            return number
        raise CannotSerialize(f"a value that is {type(value).__name__}")
    if not is_fake(value) or value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
        raise CannotSerialize(f"a tensor of {type(value).__name__}, {value.layout}")
    numbers = [static_int(size) for size in (*value.shape, *value.stride(), value.storage_offset(),
                                             value.untyped_storage().nbytes())]
    sizes = [size for size in numbers if size is not None]
    if len(sizes) < len(numbers) or sizes[-1] % value.dtype.itemsize:
        raise CannotSerialize("sizes that are not numbers")
    memory = memories.setdefault(value.untyped_storage()._cdata, len(memories))
    shape, strides = tuple(sizes[:value.ndim]), tuple(sizes[value.ndim:-2])
    return _TensorRecord(shape, strides, sizes[-2], value.dtype, value.device, value.requires_grad, memory, sizes[-1])


def _argument(x: Any, numbers: Mapping[Node, int]) -> Any:
    if isinstance(x, Node):
        return _NodeReference(numbers[x])
    if isinstance(x, _CONSTANTS):
        return x
    if isinstance(x, torch.SymInt) and (number := static_int(x)) is not None:
        return number
    raise CannotSerialize(f"an argument that is {type(x).__name__}")


def _plain(x: Any) -> Any:
    """An argument, if it is one that `_argument` makes."""
    inner: Iterable[Any] = ()
    if isinstance(x, list | tuple):
        inner = x
    elif isinstance(x, slice):
        inner = x.start, x.stop, x.step
    elif isinstance(x, dict):
        inner = (each for key, each in x.items() if own_name(key))
    elif not isinstance(x, _CONSTANTS) and type(x) is not _NodeReference:
        raise NotPlain(f"an argument that is {type(x).__name__}")
    for each in inner:
        _plain(each)
    return x


def _constant(gm: GraphModule, node: Node) -> torch.Tensor:
    value = attribute_of(gm, node)
    if type(value) is not torch.Tensor or value.device.type != "cpu" or "." in str(node.target):
        raise CannotSerialize(f"the constant {node.target}, {type(value).__name__}")
    if value.untyped_storage().nbytes() > LARGEST_CONSTANT_BYTES:
        raise CannotSerialize(f"the constant {node.target}, which is large")
    return value

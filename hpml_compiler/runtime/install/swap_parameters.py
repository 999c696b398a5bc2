"""Replace old parameters by placed ones in all objects of the script that refer to them."""
from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hpml_compiler.runtime.dtensor.op_dispatch import tensors_in
from hpml_compiler.runtime.dtensor.placed_tensor import place_like
from hpml_compiler.runtime.placements.accumulate_grad import note_eager_use
from passes import compat
from passes.errors import HpmlError

SINGLE_SCANS = 6  # scans for the referrers of one parameter; one further scan looks for those of all that are left
_FRAMES = (types.FrameType, types.GeneratorType, types.CoroutineType)


def _references(items: list[Any], index: int) -> int:
    return sys.getrefcount(items[index])


_NOBODY = _references([object()], 0)
"""Reference count of an object that only its list refers to; differs between Python releases."""


class ReplacedParameter(nn.Parameter):
    """Class of a replaced parameter that the script still refers to from a place that cannot be changed.

    Such places are local variables of running functions. Any use raises an error with the parameter's name, except in the
    backward of a graph that saved it, as long as the placed parameter has not changed.
    """

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        operands = tensors_in((args, kwargs or {}))
        if compat.inside_backward() and all(operand.is_current for operand in operands if isinstance(operand, cls)):
            with compat.plain_torch_functions():
                return func(*args, **(kwargs or {}))
        name = next(operand.__dict__["replaced_name"] for operand in operands if isinstance(operand, cls))
        raise HpmlError(
            f"parameter {name} was replaced by its placed form when the model was compiled; this is the old object",
            f"call of {getattr(func, '__name__', func)}",
            f"read it from the model again (model.get_parameter({name!r})) after the first call of the compiled model",
        )

    @property
    def is_current(self) -> bool:
        """True if it still has its values, and the placed parameter has not changed since."""
        new, version = self.__dict__.get("replaced_by", (None, 0))
        current = new and new()
        return current is not None and current._local_tensor._version == version

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<replaced parameter {self.__dict__.get('replaced_name')}>"


def rebind(names: Sequence[str], olds: list[nn.Parameter], news: Sequence[nn.Parameter]) -> list[str]:
    """Replace old parameters by new ones in all objects that refer to them; empties `olds` and frees their storage.

    Lists, dicts (keys and values), sets, deques, closures, attributes, and tuples inside of these are changed in place:
    for example optimizers' parameter groups and state, and the script's own lists. Parameters with other referrers become
    `ReplacedParameter`s; the names of those are returned.
    """
    work = _Rebinding(olds, news)
    work.run()
    _replace_nodes(olds, news)
    out_of_reach = []
    while olds:
        old, name, new = olds.pop(), names[len(olds)], news[len(olds)]  # pop comes first
        held = _references([old], 0) > _NOBODY + 1  # the variable
        in_graph = _is_in_graph(old)
        if in_graph:  # an eager operation read it before the first compiled graph did
            _hand_gradients_on(old, new)
        if held:
            if not in_graph and isinstance(old, nn.Parameter):
                old.grad = None
                old.data = old.data.new_empty(0)
                old.requires_grad_(False)
            vars(old).update(replaced_name=name)
            if in_graph:
                placed: Any = new
                vars(old).update(replaced_by=(weakref.ref(new), placed._local_tensor._version))
            old.__class__ = ReplacedParameter
            out_of_reach.append(name)
    return out_of_reach[::-1]


def _replace_nodes(olds: Sequence[nn.Parameter], news: Sequence[nn.Parameter]) -> None:
    """Replace the AccumulateGrad nodes of old parameters that the script refers to (`register_multi_grad_hook` does) by those
    of the new ones, which then call the old nodes' hooks."""
    live = [i for i, old in enumerate(olds) if _is_in_graph(old)]
    nodes, placed_nodes = ([torch.autograd.graph.get_gradient_edge(each[i]).node for i in live] for each in (olds, news))
    for node, placed_node, i in zip(nodes, placed_nodes, live, strict=True):
        _hand_hooks_on(node, placed_node, news[i])
    _Rebinding(nodes, placed_nodes).run()


def _is_in_graph(old: nn.Parameter) -> bool:
    """True if the parameter has an AccumulateGrad node."""
    return old.requires_grad and compat.use_count(old) > 1


def _hand_hooks_on(node: Any, placed_node: Any, new: Any) -> None:
    """Let a placed parameter's AccumulateGrad node call the old node's hooks, as long as they are registered and the script
    refers to the node (as with a plain parameter)."""
    before, after = _hooks_with(node.register_prehook), _hooks_with(node.register_hook)
    if not before and not after:
        return

    def call_before(gradients: Any) -> Any:
        for hook in list(before.values()):
            gradients = gradients if (given := hook(gradients)) is None else given
        return gradients

    def call_after(*gradients: Any) -> None:
        for hook in list(after.values()):
            hook(*gradients)

    placed_node.register_prehook(call_before)
    placed_node.register_hook(call_after)
    node.metadata[_PLACED_NODE] = placed_node
    note_eager_use(new)


_PLACED_NODE = "hpml: the node of the placed parameter"


def _hooks_with(register: Any) -> Any:
    """The dict of hooks that a `register_*hook` method adds to."""
    handle = register(print)
    table = handle.hooks_dict_ref()
    handle.remove()
    return table


def _hand_gradients_on(old: nn.Parameter, new: nn.Parameter) -> None:
    """Move gradients that backward accumulates for the old parameter to the new one."""
    old.grad = None  # the new parameter has it already

    def hand_on(*_: object) -> None:
        with compat.plain_torch_functions():
            gradient, old.grad = old.grad, None
        if gradient is None or not new.requires_grad:
            return
        with torch.no_grad():
            placed = place_like(gradient, new)  # type: ignore[arg-type]
            new.grad = placed if new.grad is None else new.grad.add_(placed)

    torch.autograd.graph.get_gradient_edge(old).node.register_hook(hand_on)


def rebind_attributes(modules: Iterable[nn.Module], olds: list[nn.Parameter], news: Sequence[nn.Parameter]) -> None:
    """Replace old parameters in the attributes of modules, and in attributes that are lists or dicts."""
    work = _Rebinding(olds, news)
    for module in modules:
        work.replace_in([module.__dict__, *(x for x in module.__dict__.values() if isinstance(x, (list, dict)))])


def holder_on_the_way(value: Any, way: Iterable[Any]) -> Any:
    """The object to change so that `way` (see `compat.objects_to`) leads to another value: the innermost one, or the container
    of the tuples around the value. None if no such object can be changed."""
    for holder in way:
        if isinstance(holder, tuple):
            if any(item is value for item in holder):
                value = holder
        elif any(item is value for item in _changeable(holder)):
            return holder
    return None


def _changeable(holder: Any) -> Iterable[Any]:
    """Values that `_Rebinding.replace_in` can replace in a holder that is not a tuple."""
    if isinstance(holder, dict):
        return list(holder.values())
    if isinstance(holder, (list, deque)):
        return holder
    if isinstance(holder, types.CellType):
        return [holder.cell_contents]
    if isinstance(holder, (type, torch.Tensor, *_FRAMES)):
        return []
    own = getattr(holder, "__dict__", None)
    return [*(own.values() if isinstance(own, dict) else ()),
            *(getattr(holder, slot, None) for kind in type(holder).__mro__ for slot in _slots(kind))]


def rebind_in(holders: list[Any], olds: list[nn.Parameter], news: Sequence[nn.Parameter]) -> None:
    """Replace old parameters by new ones in these objects."""
    _Rebinding(olds, news).replace_in(holders)


def rebind_all(olds: list[Any], news: Sequence[Any]) -> None:
    """Replace old objects by new ones in all objects that refer to them, as `rebind` does; the old ones stay as they are."""
    _Rebinding(olds, news).run()


class _Rebinding:
    """Replaces old objects (parameters, autograd nodes) by new ones in the objects that refer to them."""

    def __init__(self, olds: list[Any], news: Sequence[Any]) -> None:
        self.olds, self.news = olds, news
        self.index = {id(old): i for i, old in enumerate(olds)}

    def run(self) -> None:
        """Replace all. Most holders have many parameters: find the referrers of one parameter, replace all parameters in
        them, and continue with the next one that still has referrers."""
        tried: set[int] = set()
        for _ in range(SINGLE_SCANS):
            held = next((i for i in self._held() if i not in tried), None)
            if held is None:
                return
            tried.add(held)
            self.replace_in(gc.get_referrers(self.olds[held]))
        left = [self.olds[i] for i in self._held() if i not in tried]
        if left:
            self.replace_in([holder for holder in gc.get_referrers(*left) if holder is not left])

    def _held(self) -> list[int]:
        """Indices of the parameters with other referrers."""
        return [i for i in range(len(self.olds)) if _references(self.olds, i) > _NOBODY]

    def new(self, value: Any) -> Any:
        """Replacement of a value: a new parameter, a weak reference to one, a tuple with one, or the value itself."""
        index = self.index.get(id(value))
        if index is not None:
            return self.news[index]
        if type(value) is weakref.ref and id(value()) in self.index:
            return weakref.ref(self.new(value()))
        if isinstance(value, tuple) and any(self.new(item) is not item for item in value):
            items = [self.new(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def replace_in(self, holders: list[Any], depth: int = 0) -> None:
        for holder in holders:
            if holder is self.olds or holder is holders or isinstance(holder, _FRAMES):
                continue
            if isinstance(holder, tuple):
                if depth < 2:  # (name, parameter) in a list of such pairs
                    self.replace_in(gc.get_referrers(holder), depth + 1)
            elif isinstance(holder, (list, deque)):
                self._in_sequence(holder)
            elif isinstance(holder, dict):
                self._in_dict(holder)
            elif isinstance(holder, set):
                for item in [item for item in holder if id(item) in self.index]:
                    holder.discard(item)
                    holder.add(self.new(item))
            elif isinstance(holder, types.CellType):
                holder.cell_contents = self.new(holder.cell_contents)
            elif not isinstance(holder, (type, torch.Tensor)):
                self._in_object(holder)

    def _in_sequence(self, holder: Any) -> None:
        for position, item in enumerate(holder):
            new = self.new(item)
            if new is not item:
                holder[position] = new

    def _in_dict(self, holder: dict[Any, Any]) -> None:
        for key, item in list(holder.items()):
            new = self.new(item)
            if new is not item:
                holder[key] = new
        if any(id(key) in self.index for key in holder):
            items = [(self.new(key), item) for key, item in holder.items()]
            holder.clear()
            holder.update(items)

    def _in_object(self, holder: Any) -> None:
        """Replace in the attributes of an object: in its `__dict__` and in slots."""
        attributes = getattr(holder, "__dict__", None)
        if isinstance(attributes, dict):
            self._in_dict(attributes)
        for kind in type(holder).__mro__:
            for slot in _slots(kind):
                value = getattr(holder, slot, None)
                if self.new(value) is not value:
                    object.__setattr__(holder, slot, self.new(value))


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)

"""Old parameters in the script's own objects -> new ones."""
from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from torch import nn

from hpml_compiler.runtime.install.swap_parameters import (
    ReplacedParameter,
    holder_on_the_way,
    rebind,
    rebind_attributes,
    rebind_in,
)
from passes.errors import HpmlError

Pair = namedtuple("Pair", "name value")


class Holder:
    def __init__(self, value) -> None:
        self.value = value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value) -> None:
        self.value = value


def pair():
    """An old and a new parameter; the caller holds the old one in a list only."""
    return [nn.Parameter(torch.zeros(3))], nn.Parameter(torch.ones(3))


def closure_over(value):
    return lambda: value


HOLDERS = {
    "list": (lambda p: [1, p], lambda h: h[1]),
    "nested list": (lambda p: [[p]], lambda h: h[0][0]),
    "dict value": (lambda p: {"a": p}, lambda h: h["a"]),
    "dict key": (lambda p: {"x": 0, p: 1, "y": 2}, lambda h: list(h)[1]),
    "ordered dict": (lambda p: OrderedDict(a=p), lambda h: h["a"]),
    "set": (lambda p: {p}, lambda h: next(iter(h))),
    "deque": (lambda p: deque([p]), lambda h: h[0]),
    "list of pairs": (lambda p: [("a", p), ("b", 2)], lambda h: h[0][1]),
    "named tuple in a dict": (lambda p: {"a": Pair("n", p)}, lambda h: h["a"].value),
    "attribute": (Holder, lambda h: h.value),
    "slot": (Slots, lambda h: h.value),
    "closure": (closure_over, lambda h: h()),
    "module": (lambda p: nn.ParameterList([p]), lambda h: h[0]),
    "buffer of a module": (lambda p: _with_list(nn.Module(), p), lambda h: h.kept[0]),
    "optimizer": (lambda p: torch.optim.SGD([p], lr=0.1), lambda h: h.param_groups[0]["params"][0]),
}


def _with_list(module, parameter):
    module.kept = [parameter]
    return module


@pytest.mark.parametrize("kind", HOLDERS)
def test_holders_get_the_new_one(kind):
    make, look = HOLDERS[kind]
    olds, new = pair()
    holder = make(olds[0])
    old = weakref.ref(olds[0])
    assert rebind(["w"], olds, [new]) == []
    assert look(holder) is new
    assert old() is None and not olds


def test_dict_order_and_state_stay():
    olds, new = pair()
    optimizer = torch.optim.AdamW([olds[0]])
    olds[0].grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[olds[0]]
    rebind(["w"], olds, [new])
    assert list(optimizer.state) == [new] and optimizer.state[new] is state


def test_many_in_many_holders():
    olds = [nn.Parameter(torch.zeros(2)) for _ in range(50)]
    news = [nn.Parameter(torch.ones(2)) for _ in range(50)]
    everyone, alone = list(olds), [[p] for p in olds]
    assert rebind([str(i) for i in range(50)], olds, news) == []
    assert all(a is b for a, b in zip(everyone, news, strict=True))
    assert all(a[0] is b for a, b in zip(alone, news, strict=True))


def test_out_of_reach_is_loud():
    olds, new = pair()
    local = olds[0]
    local.grad = torch.ones(3)
    storage = weakref.ref(local.untyped_storage())
    assert rebind(["layer.weight"], olds, [new]) == ["layer.weight"]
    assert type(local) is ReplacedParameter and storage() is None
    uses = (torch.sum, torch.relu, nn.functional.relu, lambda p: p + 1, lambda p: p.grad, lambda p: torch.stack([p]))
    for use in uses:
        with pytest.raises(HpmlError, match="parameter layer.weight was replaced.*\n.*\n.*model.get_parameter"):
            use(local)
    assert repr(local) == "<replaced parameter layer.weight>"


def test_attributes_of_a_module_that_hold_its_parameters_follow():
    """As recurrent layers keep lists of their weights and of weak references to them."""
    (old,), new = pair()
    other = nn.Parameter(torch.zeros(1))
    module = nn.Module()
    module.kept, module.by_name, module.twice = [old, other], {"w": old}, (old, 1)
    module.refs = [weakref.ref(old), weakref.ref(other), None]
    rebind_attributes([module], [old], [new])
    assert module.kept[0] is module.by_name["w"] is module.twice[0] is module.refs[0]() is new
    assert module.kept[1] is module.refs[1]() is other and module.refs[2] is None


@pytest.mark.parametrize("make", [
    lambda p: ({"a": [0, (p, 1)]}, lambda kept: kept["a"][1][0], lambda kept: [kept["a"][1], kept["a"], kept]),
    lambda p: (types.SimpleNamespace(a=(1, (p,))), lambda kept: kept.a[1][0], lambda kept: [kept.a[1], kept.a, kept]),
    lambda p: (deque([p]), lambda kept: kept[0], lambda kept: [kept]),
    lambda p: ((lambda: p).__closure__[0], lambda kept: kept.cell_contents, lambda kept: [kept]),
])
def test_the_nearest_holder_that_can_be_changed(make):
    (old,), new = pair()
    kept, read, way = make(old)
    rebind_in([holder_on_the_way(old, way(kept))], [old], [new])
    assert read(kept) is new


@pytest.mark.parametrize("make", [lambda p: [(p,)], lambda p: [((p, 1), 2)], lambda p: [functools.partial(print, p).args],
                                  lambda p: [types.MappingProxyType({"a": p})], lambda p: []])
def test_nothing_on_the_way_can_be_changed(make):
    (old,), _ = pair()
    assert holder_on_the_way(old, make(old)) is None

"""Parameters and modules kept in plain Python containers, also under several names."""
from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from tests.scripts.models import adamw, inputs, mlp, targets
from tests.scripts.use import use


def weights(*sizes):
    return [nn.Parameter(torch.randn(b, a) / a ** 0.5) for a, b in zip(sizes, sizes[1:])]


def trained(hp, model, parameters, call=None, steps=3):
    """Parameters that no module holds are trained, too."""
    call, losses = call or hp.compile(model), []
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for number in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(inputs() + number), targets())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in parameters], [p.grad for p in parameters], model, optimizer


class Kept(nn.Module):
    """Registers some of its weights, and reads them as `find` says, from a plain container."""

    def __init__(self, keep, read, registered):
        super().__init__()
        self.body = nn.Linear(16, 16)
        made = weights(16, 16, 16, 4)
        if registered:
            for i, w in enumerate(made):
                self.register_parameter(f"w{i}", w)
        self.kept = keep(made)
        self.read = read
        self.all = [*self.body.parameters(), *made]

    def forward(self, x):
        a, b, c = self.read(self)
        return F.linear(F.linear(F.linear(self.body(x).tanh(), a).tanh(), b).tanh(), c)


@dataclass
class Data:
    a: nn.Parameter
    rest: dict = field(default_factory=dict)


class Slots:
    __slots__ = ("abc",)


Triple = namedtuple("Triple", "a b c")


def slotted(w):
    made = Slots()
    made.abc = list(w)
    return made


CONTAINERS = {
    "list": (list, lambda m: m.kept),
    "tuple": (tuple, lambda m: m.kept),
    "dict": (lambda w: dict(zip("abc", w)), lambda m: [m.kept[k] for k in "abc"]),
    "dict_of_lists": (lambda w: {"x": [w[0]], "y": {"z": [w[1], (w[2],)]}},
                      lambda m: (m.kept["x"][0], m.kept["y"]["z"][0], m.kept["y"]["z"][1][0])),
    "pairs": (lambda w: [(str(i), x) for i, x in enumerate(w)], lambda m: [x for _, x in m.kept]),
    "dataclass": (lambda w: Data(w[0], {"b": w[1], "c": [w[2]]}), lambda m: (m.kept.a, m.kept.rest["b"], m.kept.rest["c"][0])),
    "namespace": (lambda w: types.SimpleNamespace(a=w[0], b=types.SimpleNamespace(c=w[1:])),
                  lambda m: (m.kept.a, *m.kept.b.c)),
    "namedtuple": (lambda w: Triple(*w), lambda m: (m.kept.a, m.kept.b, m.kept.c)),
    "deque": (deque, lambda m: list(m.kept)),
    "ordered": (lambda w: OrderedDict(zip("abc", w)), lambda m: list(m.kept.values())),
    "slots": (slotted, lambda m: m.kept.abc),
    "groups": (lambda w: [{"params": [w[0], w[1]], "lr": 0.1}, {"params": [w[2]]}],
               lambda m: [p for group in m.kept for p in group["params"]]),
    "partial": (lambda w: functools.partial(list, w), lambda m: m.kept()),
    "closure": (lambda w: (lambda: w), lambda m: m.kept()),
    "twice": (lambda w: [w, {"again": w}], lambda m: (m.kept[0][0], m.kept[1]["again"][1], m.kept[0][2])),
}
BOTH = {name: (keep, lambda m, read=read: (m.w0 + read(m)[0], read(m)[1] + m.w1, m.w2 - read(m)[2] / 2))
        for name, (keep, read) in CONTAINERS.items()}


IN_TESTS = {"both_dict_of_lists", "both_namespace", "both_closure", "both_twice", "also_groups", "plain_dict"}


def _use(name, make):
    def run(hp):
        model = make()
        return trained(hp, model, model.all)

    run.__name__ = name
    globals()[name] = use(run, in_tests=name in IN_TESTS)


for name, (keep, read) in CONTAINERS.items():
    _use(f"plain_{name}", functools.partial(Kept, keep, read, registered=False))
    _use(f"also_{name}", functools.partial(Kept, keep, read, registered=True))
for name, (keep, read) in BOTH.items():
    _use(f"both_{name}", functools.partial(Kept, keep, read, registered=True))


class Modules(nn.Module):
    def __init__(self, keep, read):
        super().__init__()
        self.head, made = nn.Linear(16, 4), [nn.Linear(16, 16) for _ in range(3)]
        self.kept, self.read = keep(made), read
        self.all = [p for m in [*made, self.head] for p in m.parameters()]

    def forward(self, x):
        for module in self.read(self):
            x = module(x).tanh()
        return self.head(x)


for name, (keep, read) in CONTAINERS.items():
    _use(f"modules_{name}", functools.partial(Modules, keep, read))


@use
def penalty_on_a_closed_list_in_a_function(hp):
    model = mlp()
    decayed = {"all": [list(model.parameters())]}

    def call(x):
        return model(x) + sum(p.square().sum() for p in decayed["all"][0])

    return trained(hp, model, list(model.parameters()), hp.compile(call))


@use
def weight_kept_elsewhere_reads_first(hp):
    model = mlp()
    kept = [[p] for p in model.parameters()]
    penalty = hp.compile(lambda: sum(p[0].square().sum() for p in kept))
    call, optimizer, losses = hp.compile(model), adamw(model), []
    for _ in range(3):
        loss = penalty() + F.cross_entropy(call(inputs()), targets())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, optimizer

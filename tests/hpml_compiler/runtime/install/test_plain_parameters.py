"""An error comes between the compilation of a model and its first call -> its parameters become plain in the optimizer, too."""
from __future__ import annotations

import torch
from torch import nn

from hpml_compiler.runtime.install.parameter_sharding import BoundParameters
from hpml_compiler.runtime.install.plain_parameters import make_plain


def _lost_before_the_first_call(rank: int) -> tuple[bool, bool, bool]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = [each.detach().clone() for each in model.parameters()]
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}, "zero": 0})
    locals_of = BoundParameters.locals

    def lost(self, args):
        BoundParameters.locals = locals_of
        raise RuntimeError("gloo: connection closed by peer")

    BoundParameters.locals = lost
    failed = False
    try:
        call(torch.ones(4, 4)).sum().backward()
    except Exception:  # RankLost, once the heartbeats are known
        failed = True
    whole = make_plain(model, [optimizer])
    owned = optimizer.param_groups[0]["params"]
    same = all(one is other and type(one) is nn.Parameter for one, other in zip(model.parameters(), owned, strict=True))
    return failed and whole, same, all(map(torch.equal, before, [each.detach() for each in model.parameters()]))


def test_the_optimizer_has_the_parameters_of_the_model(launch) -> None:
    assert launch(_lost_before_the_first_call, 2) == [(True, True, True)] * 2

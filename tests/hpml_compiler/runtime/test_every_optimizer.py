"""Every torch optimizer, with schedulers, weight averages and GradScaler, on two ranks -> one device's results, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.hpml_compiler.runtime.common import full
from tests.hpml_compiler.test_scripts import X, Y, compiled, net


def elt(name, **kw):
    return lambda m: getattr(torch.optim, name)(m.parameters(), lr=0.01, **kw)


class Custom(torch.optim.Optimizer):
    def __init__(s, p):
        super().__init__(p, {"lr": 0.05})

    @torch.no_grad()
    def step(s, closure=None):
        for g in s.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                st = s.state[p]
                if not st:
                    st["m"] = torch.zeros_like(p)
                    st["n"] = 0
                    st["row"] = torch.zeros(p.shape[0], dtype=p.dtype)
                st["n"] += 1
                st["m"].mul_(0.9).add_(p.grad.sign())
                st["row"].lerp_(p.grad.abs().flatten(1).mean(1) if p.dim() > 1 else p.grad.abs(), 0.1)
                trust = p.norm() / (st["m"].norm() + 1e-6)
                upd = st["m"] / (st["row"].view(-1, *[1] * (p.dim() - 1)) + 1)
                p.add_(upd * trust.clamp(max=2.0).item(), alpha=-g["lr"])


class Sub(torch.optim.AdamW):
    def step(s, closure=None):
        with torch.no_grad():
            for g in s.param_groups:
                for p in g["params"]:
                    p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())) or 0, keepdim=True))
        return super().step(closure)


def groups(m):
    return torch.optim.AdamW(
        [
            {"params": [m[0].weight], "lr": 0.02, "weight_decay": 0.1},
            {"params": [p for n, p in m.named_parameters() if n != "0.weight"], "lr": 0.005},
        ]
    )


MAKE = {
    n: elt(n)
    for n in (
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Rprop",
        "ASGD",
        "Adafactor",
    )
}
MAKE |= {
    "sgd nesterov": elt("SGD", momentum=0.9, nesterov=True),
    "maximize": elt("Adam", maximize=True),
    "foreach": elt("AdamW", foreach=True),
    "fused": elt("AdamW", fused=True),
    "noforeach": elt("AdamW", foreach=False),
    "amsgrad": elt("Adam", amsgrad=True),
    "tensorlr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "groups": groups,
    "custom": lambda m: Custom(m.parameters()),
    "sub": lambda m: Sub(m.parameters(), lr=0.01),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01),
    "fusedsgd": elt("SGD", momentum=0.9, fused=True),
    "fusedadagrad": elt("Adagrad", fused=True),
    "centered": elt("RMSprop", centered=True, momentum=0.9),
}


def train(call, m, make, extra):
    o = make(m)
    seen = []
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(o, 5) if extra == "sched" else None
    swa = (
        torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        if extra == "ema"
        else torch.optim.swa_utils.AveragedModel(m)
        if extra == "swa"
        else None
    )
    sc = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if extra == "scaler" else None
    for i in range(4):
        o.zero_grad(set_to_none=i % 2 == 0)
        if extra == "lbfgs":

            def closure(o=o):
                o.zero_grad()
                loss = F.mse_loss(call(X), Y)
                loss.backward()
                return loss

            seen.append(o.step(closure).item())
            continue
        loss = F.mse_loss(call(X), Y)
        (sc.scale(loss) if sc else loss).backward()
        if extra == "byhand":
            for p in m.parameters():
                p.grad = (
                    torch.ones_like(p) * 0.1
                    if i == 1
                    else torch.full(tuple(p.shape), 0.2, dtype=p.dtype)
                    if i == 2
                    else p.grad * 2
                )
        if extra == "clip":
            seen.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.1)))
        if sc:
            sc.unscale_(o)
            seen.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.1)))
            sc.step(o)
            sc.update()
        else:
            o.step()
        if sched:
            sched.step()
        if swa:
            swa.update_parameters(m)
        if extra == "addgroup" and i == 1:
            m.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
            m.extra.grad = torch.ones(3, dtype=torch.float64)
            o.add_param_group({"params": [m.extra]})
        if extra == "roundtrip" and i == 1:
            sd = copy.deepcopy(o.state_dict())
            o = make(m)
            o.load_state_dict(sd)
        seen.append(loss.item())
    if swa:
        seen += [float(full(p.detach()).sum()) for p in swa.parameters()]
    return seen, [full(p.detach()) for p in m.parameters()]


CASES = (
    [(k, k, "") for k in MAKE]
    + [(f"AdamW {e}", "AdamW", e) for e in ("sched", "ema", "swa", "scaler", "byhand", "clip", "addgroup", "roundtrip")]
    + [
        ("Adam roundtrip", "Adam", "roundtrip"),
        ("sgd scaler", "sgd nesterov", "scaler"),
        ("custom rt", "custom", "roundtrip"),
        ("lbfgs", "lb", "lbfgs"),
        ("lbfgs wolfe", "lbw", "lbfgs"),
        ("adafactor rt", "Adafactor", "roundtrip"),
        ("fused scaler", "fused", "scaler"),
    ]
)
MAKE["lb"] = lambda m: torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=3)
MAKE["lbw"] = lambda m: torch.optim.LBFGS(m.parameters(), line_search_fn="strong_wolfe", max_iter=3)


def run_all(rank, mesh):
    model = net()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    call = compiled(model, mesh)
    for label, kind, extra in CASES:
        if hasattr(model, "extra"):
            del model.extra
        model.load_state_dict(start)
        model.zero_grad()
        ours, reference = train(call, model, MAKE[kind], extra), net()
        theirs = train(reference, reference, MAKE[kind], extra)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, label=label: f"{label}: {text}")


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}])
def test_every_optimizer_as_on_one_device(launch, mesh):
    launch(run_all, args=(mesh,), timeout_s=110)

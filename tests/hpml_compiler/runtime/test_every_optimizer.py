"""Every torch optimizer, with schedulers, weight averages and GradScaler, on two ranks -> one device's results, in float64."""
from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.optimizer.optimizer_step import ELEMENTWISE
from tests.hpml_compiler.runtime.common import full
from tests.hpml_compiler.test_scripts import X, Y, compiled, net


def elt(name, **kw):
    return lambda m: getattr(torch.optim, name)(m.parameters(), lr=0.01, **kw)


class Custom(torch.optim.Optimizer):
    def __init__(self, p):
        super().__init__(p, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), n=0, row=torch.zeros(p.shape[0], dtype=p.dtype))
                state["n"] += 1
                state["m"].mul_(0.9).add_(p.grad.sign())
                state["row"].lerp_(p.grad.abs().flatten(1).mean(1) if p.dim() > 1 else p.grad.abs(), 0.1)
                trust = p.norm() / (state["m"].norm() + 1e-6)
                update = state["m"] / (state["row"].view(-1, *[1] * (p.dim() - 1)) + 1)
                p.add_(update * trust.clamp(max=2.0).item(), alpha=-group["lr"])


class Sub(torch.optim.AdamW):
    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())) or 0, keepdim=True))
        return super().step(closure)


def groups(m):
    others = [p for name, p in m.named_parameters() if name != "0.weight"]
    return torch.optim.AdamW([{"params": [m[0].weight], "lr": 0.02, "weight_decay": 0.1}, {"params": others, "lr": 0.005}])


KINDS = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor")
MAKE = {kind: elt(kind) for kind in KINDS} | {
    "sgd nesterov": elt("SGD", momentum=0.9, nesterov=True), "maximize": elt("Adam", maximize=True),
    "foreach": elt("AdamW", foreach=True), "fused": elt("AdamW", fused=True), "noforeach": elt("AdamW", foreach=False),
    "amsgrad": elt("Adam", amsgrad=True), "tensorlr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "groups": groups, "custom": lambda m: Custom(m.parameters()), "sub": lambda m: Sub(m.parameters(), lr=0.01),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01),
    "fusedsgd": elt("SGD", momentum=0.9, fused=True), "fusedadagrad": elt("Adagrad", fused=True),
    "centered": elt("RMSprop", centered=True, momentum=0.9),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=3),
    "lbfgs wolfe": lambda m: torch.optim.LBFGS(m.parameters(), line_search_fn="strong_wolfe", max_iter=3),
}
CASES = [*((kind, "") for kind in MAKE), *(("AdamW", extra) for extra in (
    "sched", "ema", "swa", "scaler", "byhand", "clip", "addgroup", "roundtrip")), ("Adam", "roundtrip"),
    ("sgd nesterov", "scaler"), ("custom", "roundtrip"), ("Adafactor", "roundtrip"), ("fused", "scaler")]


def averaged(m, extra):
    if extra == "ema":
        return AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return AveragedModel(m) if extra == "swa" else None


def train(call, m, make, extra):
    optimizer, average, seen = make(m), averaged(m, extra), []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5) if extra == "sched" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if extra == "scaler" else None

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(call(X), Y)
        loss.backward()
        return loss

    for i in range(4):
        if isinstance(optimizer, torch.optim.LBFGS):
            seen.append(optimizer.step(closure).item())
            continue
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        loss = F.mse_loss(call(X), Y)
        (scaler.scale(loss) if scaler else loss).backward()
        if extra == "byhand":
            for p in m.parameters():
                p.grad = [p.grad * 2, torch.ones_like(p) * 0.1, torch.full(tuple(p.shape), 0.2, dtype=p.dtype), p.grad * 2][i]
        if scaler:
            scaler.unscale_(optimizer)
        if scaler or extra == "clip":
            seen.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.1)))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if schedule:
            schedule.step()
        if average:
            average.update_parameters(m)
        if extra == "addgroup" and i == 1:
            m.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
            m.extra.grad = torch.ones(3, dtype=torch.float64)
            optimizer.add_param_group({"params": [m.extra]})
        if extra == "roundtrip" and i == 1:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(m)
            optimizer.load_state_dict(saved)
        seen.append(loss.item())
    if call is not m and type(optimizer) in ELEMENTWISE and not extra:
        check_placed(optimizer)
    seen += [float(full(p.detach()).sum()) for p in average.parameters()] if average else []
    return seen, [full(p.detach()) for p in m.parameters()]


def check_placed(optimizer):
    for parameter, state in optimizer.state.items():
        assert isinstance(parameter, PlacedTensor) and parameter._local_tensor.grad is None
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                assert value.placements == parameter.placements


def run_all(rank):
    assert {kind.__name__ for kind in ELEMENTWISE} <= {*MAKE}
    for mesh, cases in ({"dp": 2}, CASES[::2]), ({"tp": 2}, CASES[1::2]):
        run_cases(mesh, cases)


def run_cases(mesh, cases):
    model = net()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    call = compiled(model, mesh)
    for kind, extra in cases:
        if hasattr(model, "extra"):
            del model.extra
        model.load_state_dict(start)
        model.zero_grad()
        ours, reference = train(call, model, MAKE[kind], extra), net()
        theirs = train(reference, reference, MAKE[kind], extra)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, at=(kind, extra): f"{at}: {text}")


def test_every_optimizer_as_on_one_device(launch):
    """Each on one of two meshes."""
    launch(run_all, timeout_s=110)

"""Public optimizers and averages of weights, each as a use: five steps of a small model.

Those of packages that are not installed are left out. `python -m tests.scripts.table_of_optimizers` runs them.
"""
from __future__ import annotations

import functools
import importlib
import inspect
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.scripts.models import inputs, targets
from tests.scripts.use import use

STEPS = 5
HALF = 3e-2
"""Tolerance of those that compute in bfloat16, such as Muon: where a sum is rounded the other way, that shows."""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))


def train(hp: Any, make: Callable[[nn.Module], Any], average: Callable[[nn.Module], Any] | None = None) -> Any:
    """Losses, weights, what is averaged of them, and the optimizer's state."""
    model, losses = net(), []
    call, optimizer = hp.compile(model), make(model)
    averaged = None if average is None else average(model)
    if hasattr(optimizer, "train"):  # schedule-free ones
        optimizer.train()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs()), targets())
        loss.backward()
        return loss

    needs_closure = "closure" in inspect.signature(type(optimizer).step).parameters and getattr(make, "closure", False)
    for _ in range(STEPS):
        if needs_closure:
            losses.append(optimizer.step(closure).item())
        else:
            losses.append(closure().item())
            optimizer.step()
        if averaged is not None:
            getattr(averaged, "update_parameters", getattr(averaged, "update", None))(
                *(() if type(averaged).__name__ == "EMA" else (model,)))
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return losses, [p.detach() for p in model.parameters()], averaged, values_in(optimizer.state_dict())


def values_in(value: Any) -> Any:
    """The tensors and numbers of a state, also in objects of the optimizer's own (projectors of GaLore)."""
    if isinstance(value, (torch.Tensor, int, float, complex, str, torch.dtype, torch.Size, type(None))):
        return value
    if isinstance(value, Mapping):
        return {key: values_in(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, deque)):
        return [values_in(item) for item in value]
    return values_in(vars(value)) if hasattr(value, "__dict__") and not callable(value) else str(type(value))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def by_class(kind: Any, *, closure: bool = False, of: Any = nn.Module.parameters, **options: Any) -> Any:
    def make(model: nn.Module) -> Any:
        return kind(of(model), **options)

    make.closure = closure  # type: ignore[attr-defined]
    return make


def of_torch() -> dict[str, Any]:
    names = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type)
             and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam", "Muon", "LBFGS")]
    found = {name: by_class(getattr(torch.optim, name), lr=0.01) for name in names}
    found["LBFGS"] = by_class(torch.optim.LBFGS, closure=True, lr=0.1)
    if hasattr(torch.optim, "Muon"):
        found["Muon"] = by_class(torch.optim.Muon, of=matrices, lr=0.01)
    return found


def of_timm(timm: Any) -> dict[str, Any]:
    outside = ("bnb", "fused", "adahessian")  # of bitsandbytes and apex; of second derivatives
    return {name: functools.partial(timm.create_optimizer_v2, opt=name, lr=0.01)
            for name in timm.list_optimizers() if not name.startswith(outside)}


CLOSURES = ("alig", "bsam", "lbfgs")


def of_pytorch_optimizer(package: Any) -> dict[str, Any]:
    found = {}
    for name in package.get_supported_optimizers():
        options = {"num_iterations": STEPS} if name == "ranger21" else {}

        def make(model: nn.Module, name: str = name, options: Any = options) -> Any:
            return package.create_optimizer(model, name, lr=0.01, **options)

        make.closure = name in CLOSURES  # type: ignore[attr-defined]
        found[name] = make
    return found


def of_heavyball(package: Any) -> dict[str, Any]:
    names = ("AdamW", "SFAdamW", "SOAP", "PSGDKron", "Muon", "LaProp", "ADOPT", "PSGDLRA", "SignLaProp", "Scion")
    return {name: by_class(getattr(package, name), lr=0.01) for name in names if hasattr(package, name)}


def of_muon(package: Any) -> dict[str, Any]:
    class Compiled:
        """The published class with its helper compiled, as its repository says it should be."""

        def __call__(self, model: nn.Module) -> Any:
            package.zeropower_via_newtonschulz5 = torch.compile(plain, backend="aot_eager")
            return package.SingleDeviceMuon(matrices(model), lr=0.02)

    def mixed(model: nn.Module) -> Any:
        package.zeropower_via_newtonschulz5 = plain
        rest = [p for p in model.parameters() if p.ndim < 2]
        return package.SingleDeviceMuonWithAuxAdam([{"params": matrices(model), "use_muon": True, "lr": 0.02},
                                                    {"params": rest, "use_muon": False, "lr": 0.01}])

    plain = package.zeropower_via_newtonschulz5
    return {"SingleDeviceMuonWithAuxAdam": mixed, "SingleDeviceMuon_compiled": Compiled()}


def of_galore(package: Any) -> dict[str, Any]:
    def make(model: nn.Module) -> Any:
        rest = [p for p in model.parameters() if p.ndim < 2]
        return package.GaLoreAdamW([{"params": rest}, low_rank(model)], lr=0.01)

    def low_rank(model: nn.Module) -> dict[str, Any]:
        return {"params": matrices(model), "rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}

    return {"GaLoreAdamW": make, "GaLoreAdafactor": lambda model: package.GaLoreAdafactor(
        [low_rank(model)], lr=0.01, relative_step=False)}


def all_of(*names: str, **options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda package: {name: by_class(getattr(package, name), **options) for name in names}


def of_adam_mini(package: Any) -> dict[str, Any]:
    return {"Adam_mini": lambda model: package.Adam_mini(model.named_parameters(), lr=0.01, dim=16, n_heads=2)}


PACKAGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "timm.optim": of_timm,
    "pytorch_optimizer": of_pytorch_optimizer,
    "schedulefree": all_of("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "AdamWScheduleFreeReference", lr=0.01),
    "muon": of_muon,
    "kron_torch": all_of("Kron", lr=0.01),
    "heavyball": of_heavyball,
    "lion_pytorch": all_of("Lion", lr=0.01),
    "dadaptation": all_of("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"),
    "prodigyopt": all_of("Prodigy"),
    "adam_mini": of_adam_mini,
    "came_pytorch": all_of("CAME", lr=0.01),
    "galore_torch": of_galore,
    "madgrad": all_of("MADGRAD", "MirrorMADGRAD", lr=0.01),
}


def averages() -> dict[str, Callable[[nn.Module], Any]]:
    swa = torch.optim.swa_utils
    found: dict[str, Callable[[nn.Module], Any]] = {
        "torch.AveragedModel": swa.AveragedModel,
        "torch.AveragedModel_ema": lambda m: swa.AveragedModel(m, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9)),
        "torch.AveragedModel_own": lambda m: swa.AveragedModel(m, avg_fn=lambda a, b, n: a + (b - a) / (n + 1)),
    }
    if (timm := installed("timm.utils")) is not None:
        found["timm.ModelEmaV2"] = lambda m: timm.ModelEmaV2(m, decay=0.9)
        found["timm.ModelEmaV3"] = lambda m: timm.ModelEmaV3(m, decay=0.9, foreach=True)
        found["timm.ModelEmaV3_loop"] = lambda m: timm.ModelEmaV3(m, decay=0.9, foreach=False, use_warmup=True)
    if (ema := installed("ema_pytorch")) is not None:
        found["ema_pytorch.EMA"] = lambda m: ema.EMA(m, beta=0.9, update_after_step=1, update_every=1)
    return found


def installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _register(name: str, *parts: Any, tolerance: float) -> None:
    def run(hp: Any) -> Any:
        return train(hp, *parts)

    run.__name__ = name
    globals()[name] = use(run, tolerance=tolerance, in_tests=False, limit_s=200)


def _register_all() -> None:
    found = {f"torch.{name}": make for name, make in of_torch().items()}
    for package, makers in PACKAGES.items():
        if (module := installed(package)) is not None:
            found |= {f"{package.split('.')[0]}.{name}": make for name, make in makers(module).items()}
    for name, make in found.items():
        _register(name, make, tolerance=HALF if "muon" in name.lower() else 1e-7)
    for name, average in averages().items():
        _register(f"{name}", by_class(torch.optim.AdamW, lr=0.01), average, tolerance=1e-9)


_register_all()

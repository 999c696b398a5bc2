"""The checks that `gpu_pass.py` starts, each in processes of its own: `gpu_checks.py CHECK --device cuda ...`.

Rank 0 prints a line `RESULT {...}` with `ok`, `says` (a few words for the table) and figures. What a check needs is
imported in it, so that one that lacks a package ends alone.
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gc
import importlib.util
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).resolve().parent
NEEDED = ("pulp", "highspy", "pydantic", "rich", "typer", "networkx", "sympy", "psutil", "packaging", "numpy")
ADDED = ("transformers", "pynvml", "graphviz", "matplotlib", "triton")
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-9, 1e-7
"""Relative, in float64."""
FLOAT32_TOLERANCE = 1e-6
"""The same for models that convert to float32 on the way, as losses and softmaxes of transformers do."""
LOW_PRECISION_TOLERANCE = 3e-2


def models_of(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_pass_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules[spec.name] = module  # where dataclasses look up what their annotations name
    spec.loader.exec_module(module)
    return module


def loss_of(output: Any) -> torch.Tensor:
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) else output


def to(batch: dict[str, Any], device: str, dtype: torch.dtype | None = None) -> dict[str, Any]:
    return {key: x.to(device, dtype if x.is_floating_point() else None) if isinstance(x, torch.Tensor) else x
            for key, x in batch.items()}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


# -- without hpml ------------------------------------------------------------------------------------------------------


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What is here, and what is missing."""
    missing = [name for name in (*NEEDED, *ADDED) if importlib.util.find_spec(name) is None]
    found: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, "cpus": os.cpu_count(),
        "missing": missing, "needed": [name for name in missing if name in NEEDED], "gpus": [],
        "nccl": dist.is_nccl_available(),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found["gpus"].append({"name": properties.name, "memory_bytes": properties.total_memory,
                              "capability": f"{properties.major}.{properties.minor}"})
    devices = ", ".join(gpu["name"] for gpu in found["gpus"]) or f"{platform.machine()} CPU"
    ok = bool(found["gpus"]) or args.device == "cpu"
    says = f"torch {torch.__version__}, Python {found['python']}, {devices}"
    return {"ok": ok, "says": says + (f"; missing: {', '.join(missing)}" if missing else ""), **found}


def energy(args: argparse.Namespace) -> dict[str, Any]:
    """Joules of two seconds of matrix products, by the meter that hpml reads (a module of the standard library alone)."""
    meters = models_of(str(HERE.parent / "hpml_compiler/energy/meters.py"))
    n = 4096 if args.device == "cuda" else 256
    x = torch.randn(n, n, device=args.device)
    with meters.EnergyMeter(args.device) as meter:
        start = time.perf_counter()
        while time.perf_counter() - start < 2.0:
            torch.mm(x, x)
            synchronize(args.device)
        joules, label = meter.joules, meter.label
        seconds = time.perf_counter() - start
    if joules is None:
        return {"ok": args.device == "cpu", "says": "no meter can be read here"}
    return {"ok": joules > 0, "says": f"{joules / seconds:.0f} W, {label}", "joules": joules, "seconds": seconds}


# -- training ----------------------------------------------------------------------------------------------------------


def trainer(model: nn.Module, call: Callable[..., Any], batch: dict[str, Any], cast: Any) -> Callable[[], torch.Tensor]:
    """One step of AdamW (SGD in float64, where values are compared: AdamW divides rounding errors by themselves)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    exact = parameters[0].dtype == torch.float64
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9) if exact else torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with cast():
            loss = loss_of(call(**batch))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trained(models: ModuleType, name: str, device: str, exact: bool, options: dict[str, Any] | None,
            ) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps and the state after them, in eager mode or, with options, split by hpml."""
    model, batch = models.build(name)
    dtype = torch.float64 if exact else torch.float32
    model, batch = model.to(device, dtype), to(batch, device, dtype)
    cast = contextlib.nullcontext if exact else lambda: torch.autocast(device, torch.bfloat16)
    call = model if options is None else torch.compile(model, backend="hpml", options=options)
    step = trainer(model, call, batch, cast)
    losses = [float(step()) for _ in range(3)]
    return losses, {key: value.detach().cpu() for key, value in model.state_dict().items()}


class SmallerFloats(TorchFunctionMode):
    """Notes whether a call makes floating-point numbers of fewer than 64 bits."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.found |= any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.itemsize < 8
                          for leaf in (made if isinstance(made, (tuple, list)) else (made,)))
        return made


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor from what it should be, relative to its largest element."""
    worst = 0.0
    for key, value in expected.items():
        theirs = found[key].to(torch.float64)
        scale = max(float(value.abs().max()), 1e-12) if value.numel() else 1.0
        worst = max(worst, float((theirs - value.to(torch.float64)).abs().max()) / scale if value.numel() else 0.0)
    return worst


def model(args: argparse.Namespace) -> dict[str, Any]:
    """A model split over the ranks against itself in eager mode on this rank's device: float64 and autocast."""
    from hpml_compiler.runtime.process.world_group import ensure_process_group
    from hpml_compiler.session import session

    world = ensure_process_group()
    models, figures, ok = models_of(args.models), {}, True
    meshes: dict[str, Any] = {"chosen": {}, "tp": {"mesh": {"tp": world}}}
    for precision, exact in (("float64", True), ("bfloat16", False)):
        try:
            with SmallerFloats() as smaller:
                losses, state = trained(models, args.name, args.device, exact, None)
        except RuntimeError as error:  # an operator of the model has no kernel for float64
            figures[precision] = {"eager_mode": one_line(error)}
            continue
        loss_limit, weight_limit = (FLOAT32_TOLERANCE,) * 2 if smaller.found else (LOSS_TOLERANCE, WEIGHT_TOLERANCE)
        for kind, pinned in meshes.items():
            torch.compiler.reset()
            session.reset()
            options = {"compiler": "eager", "costs": "roofline", "monitor": False, **pinned}
            mine, weights = trained(models, args.name, args.device, exact, options)
            apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(mine, losses, strict=True))
            differ = farthest(weights, state)
            fits = (apart < loss_limit and differ < weight_limit) if exact else apart < LOW_PRECISION_TOLERANCE
            figures[f"{precision} {kind}"] = {"losses": mine, "eager": losses, "loss_apart": apart, "state_apart": differ,
                                              "ok": fits, "graphs": len(session.current().graphs)}
            ok = ok and fits
    says = "; ".join(f"{key} {'' if each['ok'] else 'OFF '}{each['loss_apart']:.1e}" if "ok" in each else
                     f"{key}: not in eager mode" for key, each in figures.items())
    ok = ok and any("ok" in each for each in figures.values())
    return {"ok": ok, "says": f"loss apart: {says}", "backend": dist.get_backend_config(), "cases": figures}


def timed_model(device: str) -> tuple[nn.Module, dict[str, Any]]:
    models = models_of(str(HERE / "models.py"))
    torch.manual_seed(0)
    size = {"width": 1024, "layers": 6, "heads": 16, "vocab": 16384, "length": 512} if device == "cuda" else {
        "width": 64, "layers": 2, "heads": 4, "vocab": 128, "length": 32}
    gpt = models.GPT(**size)
    ids = torch.randint(0, size["vocab"], (8, size["length"]))
    return gpt.to(device), to({"ids": ids, "labels": ids.roll(-1, 1)}, device)


def profile_target() -> tuple[nn.Module, dict[str, Any]]:
    """For `hpml profile`: the command moves it."""
    return timed_model(os.environ["HPML_GPU_PASS_DEVICE"])


def step_ms(step: Callable[[], Any], device: str, steps: int) -> float:
    for _ in range(3):
        step()
    times = []
    for _ in range(steps):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def step_time(args: argparse.Namespace) -> dict[str, Any]:
    """One rank: a step in eager mode, with inductor, and with hpml, as it is and with the loss in chunks, in autocast."""
    found: dict[str, float] = {}
    for name in ("eager", "inductor", "hpml", "hpml in 4 chunks"):
        torch.compiler.reset()
        gpt, batch = timed_model(args.device)
        call = gpt if name == "eager" else torch.compile(
            gpt, backend=name.partition(" ")[0], options={"loss_chunks": 4} if name.endswith("chunks") else None)
        step = trainer(gpt, call, batch, lambda: torch.autocast(args.device, torch.bfloat16))
        found[name] = min(step_ms(step, args.device, 20) for _ in range(3))  # small steps wait for the processor
    ratio = found["hpml"] / found["inductor"]
    says = ", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items())
    return {"ok": ratio < 1.1 or args.device == "cpu", "says": f"{says}; hpml {ratio:.2f} times inductor", "ms": found}


def peak_of(step: Callable[[], Any], device: str, parameters_bytes: int) -> int:
    """The most bytes that tensors occupied in one step of AdamW: of the allocator or, on a CPU, of a profile."""
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated()
    from hpml_compiler.monitor.profiled_step import StepProfile

    profiled = StepProfile(device)
    step()
    found = profiled.stop(3 * parameters_bytes)  # with two moments each
    assert found is not None
    return found.peak_bytes


def large_model(name: str, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model whose activations outweigh its parameters, on the device."""
    cuda = device == "cuda"
    if name == "gpt":
        gpt, batch = timed_model(device)
        return gpt, {key: x.repeat(4 if cuda else 2, 1) for key, x in batch.items()}
    torch.manual_seed(0)
    net = models_of(str(HERE / "small_models.py")).ConvNet(width=128 if cuda else 16, depth=8 if cuda else 3)
    rows, size = (64, 56) if cuda else (8, 16)
    return net.to(device), to({"pixels": torch.randn(rows, 3, size, size), "labels": torch.randint(0, 10, (rows,))}, device)


BUDGETS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt": {
        "ample": {"memory_budget": "64GiB"}, "0.8": {"share": 0.8}, "0.6": {"share": 0.6},
        "0.5, offload": {"share": 0.5, "offload": "saved"}, "full recomputation": {"recompute": "full"},
        "2 microbatches": {"microbatches": 2}, "2 microbatches, 0.8": {"microbatches": 2, "share": 0.8}},
    "convnet": {"ample": {"memory_budget": "64GiB"}, "0.8": {"share": 0.8}, "0.6": {"share": 0.6}},
}
"""Options by case; share: of the peak that the same step had without one."""


def budget(args: argparse.Namespace) -> dict[str, Any]:
    """One rank below memory budgets: the peak beside the budget and the prediction, and the loss beside eager mode's."""
    import hpml_compiler
    from hpml_compiler.session import session

    found: dict[str, dict[str, Any]] = {}
    whole: dict[int, int] = {}
    for name, options in BUDGETS[args.name].items():
        torch.compiler.reset()
        session.reset()
        gpt = batch = call = step = None  # of the case before
        gc.collect()
        before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
        gpt, batch = large_model(args.name, args.device)
        micro = options.get("microbatches", 1)
        asked = {key: value for key, value in options.items() if key != "share"}
        if "share" in options:
            asked["memory_budget"] = int(options["share"] * whole[micro])
        eager = float(loss_of(copy.deepcopy(gpt)(**batch)))  # a copy's BatchNorm changes its own buffers
        call = torch.compile(gpt, backend="hpml", options=asked)
        step = trainer(gpt, call, batch, lambda: torch.autocast(args.device, torch.bfloat16))
        try:
            apart = abs(float(step()) - eager)
        except Exception as error:
            if "Infeasible" not in str(error):
                raise
            found[name] = {"refused": one_line(error)}  # with the least budget that would do
            print(f"CASE {name}: refused", flush=True)
            continue
        ms, peak = step_ms(step, args.device, 10), peak_of(step, args.device, sum(p.nbytes for p in gpt.parameters()))
        whole.setdefault(micro, peak - before)
        plan = hpml_compiler.last_plan()
        found[name] = {"peak_bytes": peak - before, "budget_bytes": asked.get("memory_budget") if "share" in options else None,
                       "ms": ms, "loss_apart": apart, "predicted_bytes": plan.peak.bytes, "left_behind_bytes": before,
                       "predicted_ms": plan.predicted.step_time_us / 1e3}
        print(f"CASE {name}: {in_words(found[name])}", flush=True)
    return {"ok": all(map(kept_below, found.values())) or args.device == "cpu", "cases": found,
            "says": "; ".join(f"{name}: {in_words(each)}" for name, each in found.items())}


def kept_below(case: dict[str, Any]) -> bool:
    if "refused" in case:
        return True
    budget_bytes = case["budget_bytes"] or case["peak_bytes"]
    return case["loss_apart"] < LOW_PRECISION_TOLERANCE and case["peak_bytes"] <= 1.03 * budget_bytes


def in_words(case: dict[str, Any]) -> str:
    if "refused" in case:
        return "refused"
    parts = [f"{case['peak_bytes'] / 2**20:.1f} MiB"]
    parts += [f"{case['peak_bytes'] / case['budget_bytes']:.3f} of the budget"] if case["budget_bytes"] else []
    parts += [f"{case['predicted_bytes'] / case['peak_bytes']:.3f} predicted"]
    left = case["left_behind_bytes"] / 2**20
    parts += [f"{left:.0f} MiB left by the case before"] if left > 1 else []
    return ", ".join([*parts, f"{case['ms']:.1f} ms"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Ranks with inductor: step time, memory and energy beside what was predicted, by the run's own monitor."""
    import hpml_compiler
    from hpml_compiler.runtime.process.world_group import ensure_process_group

    ensure_process_group()
    gpt, batch = timed_model(args.device)
    step = trainer(gpt, torch.compile(gpt, backend="hpml"), batch, lambda: torch.autocast(args.device, torch.bfloat16))
    step()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = step_ms(step, args.device, 30)
    report = hpml_compiler.last_report()
    memory, most = report.peak_memory, torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    figures = {
        "mesh": dict(hpml_compiler.last_plan().mesh), "step_ms": ms, "predicted_ms": report.step_time.predicted / 1e3,
        "monitor_ms": report.step_time.measured / 1e3, "predicted_bytes": memory.predicted if memory else None,
        "profiled_bytes": memory.measured if memory else None, "max_memory_allocated": most, "energy_j": report.energy_j,
        "measured_energy_j": report.measured_energy_j, "energy_source": report.energy_source,
        "classes_us": {c.name: [c.predicted, c.measured] for c in report.classes},
    }
    says = f"mesh {figures['mesh']}, {ms:.2f} ms; {report.text()}"
    return {"ok": memory is not None, "says": says, "backend": dist.get_backend_config(), **figures}


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """`hpml profile` on one rank, and the step that is then predicted from it."""
    os.environ["HPML_GPU_PASS_DEVICE"] = args.device
    import hpml_compiler
    from hpml_compiler.planner.graph.measured_costs import sharing_key
    from hpml_compiler.profile.model_profile import profile_model
    from passes.cost_model.measured.measurement_cache import MeasurementCache

    with MeasurementCache() as cache:
        found = profile_model(*profile_target(), cache, seconds=6.0)
    gpt, batch = timed_model(args.device)
    call = torch.compile(gpt, backend="hpml", options={"memory_budget": "64GiB"})  # one device is planned where it has one
    step = trainer(gpt, call, batch, contextlib.nullcontext)
    measured, predicted = step_ms(step, args.device, 20), hpml_compiler.last_plan().predicted
    says = (f"{len(found.operations)} operations on {found.device}, {len(found.failed)} failed; a step predicted "
            f"{predicted.step_time_us / 1e3:.2f} ms, measured {measured:.2f} ms")
    return {"ok": bool(found.operations) and found.device == sharing_key(args.device, 1), "says": says, "measured_ms": measured,
            "failed": dict(found.failed), "factors": dict(found.factors), "overheads_us": dict(found.overheads_us),
            "predicted": predicted.model_dump(mode="json")}


def collectives(args: argparse.Namespace) -> dict[str, Any]:
    """Every functional collective on tensors of the device, against what it should give."""
    from hpml_compiler.runtime.process.world_group import ensure_process_group

    world, rank = ensure_process_group(), dist.get_rank()
    c10d, name, wrong = torch.ops._c10d_functional, dist.group.WORLD.group_name, []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        rows = (torch.arange(2 * world, device=args.device).view(world, 2) + 100 * rank).to(dtype)
        every = [(torch.arange(2 * world, device=args.device).view(world, 2) + 100 * r).to(dtype) for r in range(world)]
        ones = [1] * world
        for kind, got, expected in (
            ("all_reduce", c10d.all_reduce(rows, "sum", name), sum(every[1:], every[0])),
            ("all_gather", c10d.all_gather_into_tensor(rows, world, name), torch.cat(every)),
            ("reduce_scatter", c10d.reduce_scatter_tensor(rows, "sum", world, name), sum(every[1:], every[0])[rank:rank + 1]),
            ("all_to_all", c10d.all_to_all_single(rows, ones, ones, name), torch.stack([x[rank] for x in every])),
            ("broadcast", c10d.broadcast(rows, 0, name), every[0]),
        ):
            if not torch.equal(c10d.wait_tensor(got), expected):
                wrong.append(f"{kind} of {dtype}")
    backend = dist.get_backend_config()
    return {"ok": not wrong, "says": f"wrong: {', '.join(wrong)}" if wrong else f"all right over {backend}", "backend": backend}


def checks() -> dict[str, Callable[[argparse.Namespace], dict[str, Any]]]:
    """By name; those of other files import this one."""
    from gpu_checkpoints import checkpoint
    from gpu_outputs import heads, outputs
    from gpu_recovery import out_of_memory

    return {check.__name__: check for check in (
        environment, energy, collectives, model, step_time, budget, run, profile, outputs, heads, checkpoint, out_of_memory)}


@contextlib.contextmanager
def _group() -> Iterator[None]:
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=checks())
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default=str(HERE / "small_models.py"))
    parser.add_argument("--name", default="", help="of the model, for the checks `model` and `budget`; of cases, for `heads`")
    args = parser.parse_args()
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)  # where a check was when its time was over
    sys.path.insert(0, str(HERE.parent))
    if args.device == "cuda" and torch.cuda.is_available():  # before anything is moved, as the documentation says
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    with _group():
        try:
            result = checks()[args.check](args)
        except Exception as error:  # the table says it in a line, the output has it whole
            import traceback

            traceback.print_exc()
            result = {"ok": False, "says": one_line(error)}
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"RESULT {json.dumps(result)}", flush=True)
        if not result["ok"]:
            sys.stdout.flush()
            os._exit(1)  # at once: the others may wait for this rank


if __name__ == "__main__":
    main()

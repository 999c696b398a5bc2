"""Predicted against measured step time and peak memory, after `hpml profile`, in the same run.

    python benchmarks/cost_model_accuracy.py ../shared/acceptance/models.py [--models gpt2 vit] [--ranks 1 2]

FILE has `build(name) -> (model, batch)` and `MODELS`. For every model: the collectives and the model are profiled, and in
turns with that its training step (AdamW) is timed, on one rank (inductor, priced as a plan of one device), and on two with
the mesh pinned to dp and to tp; what ran is then priced with all that was measured. Memory is that of the simulated step
(`bound`: of the plan, which is what a budget limits). Prints a JSON line per row, then a summary: median and worst relative
error of time and memory, and how many pairs of meshes of one model and number of ranks, whose times differ by over 10%,
are ordered rightly.
"""
from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import report, seconds, turn

COLLECTIVE_SECONDS, PROFILE_SECONDS, TURNS, ROUNDS = 3.0, 12.0, 6, 3
"""Profiling and measuring take turns, since the machine's own speed comes and goes by a quarter within seconds."""


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("accuracy_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configurations(ranks: int) -> list[dict[str, int]]:
    return [{}] if ranks == 1 else [{"dp": ranks}, {"tp": ranks}]


def work(path: str, names: list[str]) -> None:
    """In a rank: profile, compile, then time and profile in turns; rank 0 prints a row per configuration."""
    torch.set_num_threads(1)
    from hpml_compiler.profile.collective_timing import profile_collectives
    from hpml_compiler.profile.model_profile import ModelProfiler
    from hpml_compiler.runtime.process.world_group import ensure_process_group
    from hpml_compiler.session import session
    from passes.cost_model.measured.measurement_cache import MeasurementCache

    ranks = ensure_process_group()
    module = load(path)
    with MeasurementCache() as cache:
        if ranks > 1:
            profile_collectives(cache, COLLECTIVE_SECONDS / 2)
        for name in names:
            session.reset()
            profiler = ModelProfiler(*module.build(name))
            profiler.sample(PROFILE_SECONDS / 4)
            profiler.keep(cache)
            rows = [Row(module, name, mesh, ranks) for mesh in configurations(ranks)]
            for _ in range(TURNS):
                for row in rows:
                    for _ in range(ROUNDS):
                        row.times += turn(row.timed, steps=5)
                profiler.sample(PROFILE_SECONDS / TURNS)
            if ranks > 1:
                profile_collectives(cache, COLLECTIVE_SECONDS / 2)
            profiler.keep(cache)
            for row in rows:
                row.measure_memory()
            for row in rows:
                found = row.result()
                if not dist.is_initialized() or dist.get_rank() == 0:
                    report(found)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Row:
    """One model on one mesh: its compiled step, its times, its plan."""

    def __init__(self, module: Any, name: str, mesh: dict[str, int], ranks: int):
        import hpml_compiler
        from hpml_compiler.session import session

        self.module, self.name, self.mesh, self.ranks, self.times = module, name, mesh, ranks, []
        session.reset()
        self._compile({"mesh": mesh})
        for _ in range(6):
            self.step()
        self.ran = hpml_compiler.last_plan() if ranks > 1 else None

    def _compile(self, options: dict[str, Any]) -> None:
        self.model, self.batch = self.module.build(self.name)
        self.call = (
            torch.compile(self.model) if self.ranks == 1 else torch.compile(self.model, backend="hpml", options=options))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def plan(self) -> Any:
        """What ran, with the prices of everything that was measured by then: compiled anew, obeying the plan."""
        import hpml_compiler
        from hpml_compiler.session import session
        from passes.hardware.cluster import Cluster

        session.reset()
        torch.compiler.reset()
        if self.ran is None:
            model, batch = self.module.build(self.name)
            return hpml_compiler.plan(model, batch, Cluster.local(1, "cpu"), trace_all_layers=True)
        self._compile({"plan": self.ran, "compiler": "eager"})
        for _ in range(2):
            self.step()
        return hpml_compiler.last_plan()

    def step(self) -> None:
        from hpml_compiler.profile.training_steps import loss_of

        loss_of(self.call(**self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> float:
        if dist.is_initialized():
            dist.barrier()
        took = torch.tensor(seconds(self.step), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took)

    def measure_memory(self) -> None:
        """Parameters, optimizer state and what the profiler saw come and go in one step, gradients among it."""
        from hpml_compiler.monitor.profiled_step import StepProfile

        held = [local(t) for t in self.model.parameters()]
        held += [local(t) for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        profile = StepProfile("cpu")
        self.step()
        self.peak_bytes = profile.stop(sum(storages.values())).peak_bytes

    def result(self) -> dict[str, Any]:
        from hpml_compiler.simulate import simulate

        plan, peak = self.plan(), self.peak_bytes
        predicted, measured, memory, simulated = plan.predicted, statistics.median(self.times), plan.memory, simulate(plan)
        time_s = predicted.step_time_us * 1e-6
        return {
            "model": self.name, "ranks": self.ranks, "mesh": self.mesh, "predicted_s": time_s, "measured_s": measured,
            "time_error": time_s / measured - 1, "parts_s": {
                part: getattr(predicted, f"{part}_us") * 1e-6
                for part in ("compute", "communication", "optimizer", "overhead")},
            "simulated_s": simulated.step_us * 1e-6, "predicted_peak_bytes": simulated.peak_bytes,
            "measured_peak_bytes": peak, "memory_error": simulated.peak_bytes / peak - 1,
            "bound_peak_bytes": memory.peak, "bound_parts": memory.model_dump(),
        }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def launch(path: str, names: list[str], ranks: int, cache: str) -> list[dict[str, Any]]:
    worker = [__file__, path, "--worker", "--models", *names]
    command = [sys.executable, *worker] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *worker]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HPML_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"model"')]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    time_errors, memory_errors = ([abs(row[key]) for row in rows] for key in ("time_error", "memory_error"))
    pairs = [(a, b) for a, b in itertools.combinations(rows, 2)
             if (a["model"], a["ranks"]) == (b["model"], b["ranks"])
             and max(a["measured_s"], b["measured_s"]) > 1.1 * min(a["measured_s"], b["measured_s"])]
    right = sum((a["measured_s"] < b["measured_s"]) == (a["predicted_s"] < b["predicted_s"]) for a, b in pairs)
    return {
        "benchmark": "cost_model_accuracy", "rows": len(rows),
        "time_error": {"median": statistics.median(time_errors), "worst": max(time_errors)},
        "memory_error": {"median": statistics.median(memory_errors), "worst": max(memory_errors)},
        "ranking": {"pairs": len(pairs), "right": right},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="a Python file with build(name) and MODELS")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--worker", action="store_true", help="measure here; for the launches that this makes itself")
    args = parser.parse_args()
    path = str(Path(args.file).resolve())
    names = args.models or list(load(path).MODELS)
    if args.worker:
        work(path, names)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for ranks in args.ranks:
            for name in names:
                for row in launch(path, [name], ranks, cache):
                    report(row)
                    rows.append(row)
    report(summary(rows))


if __name__ == "__main__":
    main()

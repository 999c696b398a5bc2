"""Optuna over the width of a model and the options of hpml: what does not fit or would be slow is pruned before anything runs.

    python examples/optuna_search.py --cluster 1x4:a100-40g --trials 4

A trial asks the planner for the step time and the memory on the cluster where the training will run, which takes seconds on a
laptop. Only the trials that remain are trained (here for a few steps on this machine, to compare their losses).
"""
from __future__ import annotations

import argparse

import optuna
import torch
from torch import nn

import hpml_compiler
from passes.errors import Infeasible

ROWS = 4096


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(inputs), targets)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :8].argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="1x4:a100-40g")
    parser.add_argument("--budget", default="16MiB", help="memory that the model may take on each device")
    parser.add_argument("--slowest-ms", type=float, default=0.5)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--output", default="")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()

    def objective(trial: optuna.Trial) -> float:
        torch.manual_seed(0)
        model = Model(trial.suggest_categorical("width", [128, 1024]))
        options = {"microbatches": trial.suggest_categorical("microbatches", [1, 4])}
        try:
            plan = hpml_compiler.plan(model, batch(0), cluster=given.cluster, memory_budget=given.budget, **options)
        except Infeasible as error:  # the message says what would fit
            trial.set_user_attr("refused", str(error))
            raise optuna.TrialPruned() from error
        trial.set_user_attr("step_ms", plan.predicted.step_time_us / 1e3)
        if plan.predicted.step_time_us / 1e3 > given.slowest_ms:
            raise optuna.TrialPruned()
        step = torch.compile(model, backend="hpml", options={"compiler": given.compiler, **options})
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for seed in range(3):
            loss = step(*batch(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    grid = {"width": [128, 1024], "microbatches": [1, 4]}
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(grid, seed=0))
    study.optimize(objective, n_trials=given.trials)
    for trial in study.trials:
        result = f"loss {trial.value:.6f}" if trial.value is not None else trial.state.name.lower()
        print(f"step {trial.number} {trial.params} {trial.user_attrs.get('step_ms', float('nan')):.3f} ms {result}")
    print(f"evaluation {study.best_value:.6f} with {study.best_params}")


if __name__ == "__main__":
    main()

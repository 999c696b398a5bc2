"""A run that a scheduler may interrupt at any moment: started again, it goes on after the last checkpoint.

    hpml run --nproc 2 examples/long_run.py --folder runs/a        # SIGTERM or SIGUSR1: saves at the next step, and ends

slurm/train.sbatch, kubernetes/jobset.yaml and kubernetes/trainjob.yaml start it on several nodes.
"""
from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpml_compiler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="folder of the checkpoints, which all nodes share")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to watch a run as small as this one")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = (inputs.sum(1) > 0).long()
    loader = hpml_compiler.distribute(DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True))
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = torch.compile(net, backend="hpml", options={"compiler": given.compiler})
    checkpointer = hpml_compiler.Checkpointer(given.folder, model, optimizer, loader=loader, every=given.every, keep=2)

    step = checkpointer.resume()
    print(f"starts at step {step}", flush=True)
    while step < given.steps:
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            time.sleep(given.pause)
            checkpointer.step(step)
            step += 1
            if step == given.steps:
                break
    checkpointer.close()
    print("finished", flush=True)


if __name__ == "__main__":
    main()

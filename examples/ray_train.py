"""Ray Train on several workers: training, evaluation, a checkpoint saved and resumed.

    python examples/ray_train.py --workers 1             # on one device
    python examples/ray_train.py --workers 2             # on two: the same losses
    python examples/ray_train.py --workers 2 --resume    # from the checkpoint after the first epoch

The loop is that of Ray's documentation: `prepare_model` puts DDP around the compiled model and `prepare_data_loader` gives
each worker rows of its own. torch.compile is all that hpml needs; losses and gradients are those of all rows together.
"""
from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 32


def dataset(rows: int, seed: int) -> TensorDataset:
    inputs = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 0).long())


class Classifier(nn.Module):
    """Returns its loss, which is then that of all workers' rows. A loss that is computed outside, from the outputs for own
    rows, is the loss of those, as under DDP; the gradients are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3))

    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(inputs), target)


def train(config: dict) -> None:
    import hpml_compiler

    world = ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    net = Classifier()
    model = prepare_model(torch.compile(net, backend="hpml", options={"compiler": config["compiler"]}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = prepare_data_loader(DataLoader(dataset(256, 0), batch_size=GLOBAL_BATCH // world))
    first = 0
    if config["resume"]:
        state = torch.load(f"{config['resume']}/state.pt")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    for epoch in range(first, 2):
        losses = []
        for inputs, target in loader:
            loss = model(inputs, target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        state = hpml_compiler.full_state_dict(net, optimizer)  # all workers gather, rank 0 keeps
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save({**state, "epoch": epoch}, Path(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
                print(f"epoch {epoch}", *(f"{loss:.6f}" for loss in losses), flush=True)
            ray.train.report({"epoch": epoch, "loss": losses[-1]}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", default="ray_output")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()
    output = Path(given.output).absolute()
    saved = sorted(output.glob("**/checkpoint_*/state.pt"))
    config = {"compiler": given.compiler, "resume": str(saved[0].parent) if given.resume else None}
    ray.init(num_cpus=given.workers + 2, include_dashboard=False)  # two more for Ray's own actors
    trainer = TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=given.workers),
                           run_config=RunConfig(name=f"workers_{given.workers}", storage_path=str(output)))
    print(f"loss {trainer.fit().metrics['loss']:.6f}")


if __name__ == "__main__":
    main()

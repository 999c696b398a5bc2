"""accelerate's loop on several ranks: training, evaluation, a checkpoint saved and resumed.

    python examples/accelerate_loop.py                          # on one device
    hpml run --nproc 2 examples/accelerate_loop.py              # on two: the same losses
    hpml run --nproc 2 examples/accelerate_loop.py --resume     # from the state after step 6

`hpml_compiler.one_device()` and `dynamo_backend` are all that hpml needs: batch_size is the batch of the one device that
all ranks stand for.
"""
from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpml_compiler


def dataset(rows: int, seed: int) -> TensorDataset:
    inputs = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 0).long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="accelerate_output")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()
    hpml_compiler.one_device(compiler=given.compiler)
    set_seed(0)
    # seedable: a resumed run shuffles as the first one did
    accelerator = Accelerator(gradient_accumulation_steps=2, dynamo_backend="hpml",
                              dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    training, evaluation = DataLoader(dataset(512, 0), batch_size=32, shuffle=True), DataLoader(dataset(128, 1), batch_size=32)
    model, optimizer, training, evaluation, scheduler = accelerator.prepare(
        model, optimizer, training, evaluation, scheduler)
    done, batches = 0, training
    if given.resume:
        accelerator.load_state(f"{given.output}/state")
        done, batches = 6, accelerator.skip_first_batches(training, 12)

    model.train()
    for inputs, target in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            accelerator.print(f"step {done} loss {loss.item():.6f} norm {norm.item():.5f}")
            if done == 6:
                accelerator.save_state(f"{given.output}/state")

    model.eval()
    right = torch.zeros(())
    for inputs, target in evaluation:
        with torch.no_grad():
            predicted = model(inputs).argmax(-1)
        predicted, target = accelerator.gather_for_metrics((predicted, target))
        right += (predicted == target).sum()
    accelerator.print(f"evaluation accuracy {right.item() / 128:.4f}")
    accelerator.save_model(model, f"{given.output}/model")


if __name__ == "__main__":
    main()

"""Lightning on several ranks: training, evaluation, a checkpoint saved and resumed.

    python examples/lightning_trainer.py                         # on one device
    hpml run --nproc 2 examples/lightning_trainer.py             # on two: the same losses
    hpml run --nproc 2 examples/lightning_trainer.py --resume    # from the checkpoint after the first epoch

`strategy=HpmlStrategy()` and torch.compile are all that hpml needs: batch_size is the batch of the one device that all
ranks stand for.
"""
from __future__ import annotations

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpml_compiler.integrations.lightning import HpmlStrategy


class Classifier(L.LightningModule):
    def __init__(self, compiler: str = "inductor") -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 3))
        self.net = torch.compile(net, backend="hpml", options={"compiler": compiler})

    def training_step(self, batch, number):
        inputs, target = batch
        loss = nn.functional.cross_entropy(self.net(inputs), target)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        inputs, target = batch
        self.log("accuracy", (self.net(inputs).argmax(-1) == target).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)]


class Print(Callback):
    @rank_zero_only
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        print(f"step {trainer.global_step} loss {outputs['loss'].item():.6f}", flush=True)

    @rank_zero_only
    def on_validation_epoch_end(self, trainer, module):
        print(f"epoch {trainer.current_epoch} accuracy {trainer.callback_metrics['accuracy'].item():.4f}", flush=True)


def loader(rows: int, seed: int) -> DataLoader:
    inputs = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 0).long()), batch_size=32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="lightning_output")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()
    L.seed_everything(0)
    checkpoints = ModelCheckpoint(given.output, filename="{epoch}", save_top_k=-1)
    trainer = L.Trainer(strategy=HpmlStrategy(), max_epochs=2, gradient_clip_val=1.0, num_sanity_val_steps=0, logger=False,
                        callbacks=[checkpoints, Print()], enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Classifier(given.compiler), loader(256, 0), loader(64, 1),
                ckpt_path=f"{given.output}/epoch=0.ckpt" if given.resume else None)


if __name__ == "__main__":
    main()

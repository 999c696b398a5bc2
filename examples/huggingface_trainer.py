"""transformers' Trainer on several ranks: training, evaluation, a checkpoint saved and resumed.

    python examples/huggingface_trainer.py                        # on one device
    hpml run --nproc 2 examples/huggingface_trainer.py            # on two: the same losses
    hpml run --nproc 2 examples/huggingface_trainer.py --resume   # from the checkpoint after step 6

`hpml_compiler.one_device()` and `torch_compile_backend` are all that hpml needs. per_device_train_batch_size is the batch
of the one device that all ranks stand for.
"""
from __future__ import annotations

import argparse

import numpy as np
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import hpml_compiler


class Counting(Dataset):
    """Sentences that count upwards from anywhere, of various lengths: what is beyond the end is padding, no label."""

    def __init__(self, rows: int, seed: int) -> None:
        draws = np.random.default_rng(seed)
        self.starts, self.lengths = draws.integers(1, 50, rows), draws.integers(4, 13, rows)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> dict:
        tokens, real = self.starts[row] + np.arange(12), np.arange(12) < self.lengths[row]
        return {"input_ids": np.where(real, tokens, 0), "labels": np.where(real, tokens, -100)}


def accuracy(predicted) -> dict[str, float]:
    logits, labels = predicted
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] >= 0]
    return {"accuracy": float(right.mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="trainer_output")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()
    hpml_compiler.one_device(compiler=given.compiler)
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    arguments = TrainingArguments(
        given.output, torch_compile_backend="hpml", per_device_train_batch_size=16, gradient_accumulation_steps=2,
        max_steps=12, learning_rate=1e-3, max_grad_norm=1.0, logging_steps=1, eval_strategy="steps", eval_steps=6,
        save_strategy="steps", save_steps=6, load_best_model_at_end=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Counting(512, 0),
                      eval_dataset=Counting(64, 1), compute_metrics=accuracy)
    trainer.train(resume_from_checkpoint=f"{given.output}/checkpoint-6" if given.resume else None)
    trainer.save_model()
    for logged in trainer.state.log_history:  # of a resumed run, it has the steps before as well
        if trainer.is_world_process_zero() and "loss" in logged and logged["step"] > 6 * given.resume:
            print(f"step {logged['step']} loss {logged['loss']:.6f} norm {logged['grad_norm']:.5f}")
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"evaluation loss {result['eval_loss']:.6f} accuracy {result['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()

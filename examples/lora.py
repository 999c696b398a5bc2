"""LoRA by peft on a model of transformers read from safetensors; the adapter is saved as peft saves it on one device.

    python examples/lora.py                          # on one device
    hpml run --nproc 2 examples/lora.py              # on two: the same losses, the frozen weights are split

The weights of the base model are made here, since the example needs no network; `from_pretrained` reads any other.
"""
from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import hpml_compiler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="lora_output")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()
    folder = Path(given.output)
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=96)
    with tempfile.TemporaryDirectory() as base:
        LlamaForCausalLM(config).save_pretrained(base)
        model = LlamaForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step = torch.compile(model, backend="hpml", options={"compiler": given.compiler})
    tokens = torch.randint(96, (8, 16), generator=torch.Generator().manual_seed(1))
    for number in range(4):
        loss = step(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.6f}")

    # Gathering needs all ranks, so it stands before the question which rank writes.
    adapter = {name.replace(".default", ""): value.contiguous() for name, value in hpml_compiler.full_state_dict(model).items()
               if "lora_" in name}
    if adapter:  # rank 0 has it
        folder.mkdir(parents=True, exist_ok=True)
        save_file(adapter, folder / "adapter_model.safetensors")
        model.peft_config["default"].save_pretrained(folder)
        print(f"evaluation {sum(value.abs().sum().item() for value in adapter.values()):.5f}")


if __name__ == "__main__":
    main()

"""The models of `hand_tuned.py`, on the meta device: to be planned, never run.

Each function without arguments returns `(model, batch)` and is a TARGET (`tuned_models.py:t5_11b`). `batch` is the
global batch.
All are models of `transformers`, in bfloat16 and with their loss inside.
"""
from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

PLAIN: dict[str, Any] = {"use_cache": False, "dtype": "bfloat16"}


def _on_meta(kind: type[nn.Module], config: object) -> Any:
    with torch.device("meta"):
        return kind(config).to(torch.bfloat16)


def _ids(rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long, device="meta")


def gpt(hidden: int, layers: int, heads: int, batch: int):
    """A GPT with learned positions, on sequences of 2048."""
    config = transformers.GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=51200, n_positions=2048, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, loss_type="ForCausalLM", **PLAIN)
    ids = _ids(batch, 2048)
    return _on_meta(transformers.GPT2LMHeadModel, config), {"input_ids": ids, "labels": ids}


def gpt_13b():
    """40 layers, hidden 5120: GPT-3 13B, on 64 sequences."""
    return gpt(5120, 40, 40, 64)


def gpt3_175b():
    """96 layers, hidden 12288, on 1536 sequences."""
    return gpt(12288, 96, 96, 1536)


def llama_8b():
    """Llama 3 8B on 16 sequences of 8192."""
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, **PLAIN)
    ids = _ids(16, 8192)
    return _on_meta(transformers.LlamaForCausalLM, config), {"input_ids": ids, "labels": ids, "use_cache": False}


def t5_11b():
    """T5 11B: 24 layers of encoder and of decoder, on 128 pairs of 512 tokens."""
    config = transformers.T5Config(
        d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128, vocab_size=32128, dropout_rate=0.0,
        decoder_start_token_id=0, **PLAIN)
    ids = _ids(128, 512)
    return _on_meta(transformers.T5ForConditionalGeneration, config), {"input_ids": ids, "labels": ids, "use_cache": False}


def vit_huge():
    """ViT-H/14: 32 layers, hidden 1280, on 512 images."""
    config = transformers.ViTConfig(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, patch_size=14, num_labels=1000,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, problem_type="single_label_classification",
        dtype="bfloat16")
    images = torch.zeros(512, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    labels = torch.zeros(512, dtype=torch.long, device="meta")
    return _on_meta(transformers.ViTForImageClassification, config), {"pixel_values": images, "labels": labels}


def mixtral_8x7b():
    """Mixtral 8x7B on 64 sequences of 4096."""
    config = transformers.MixtralConfig(max_position_embeddings=4096, **PLAIN)
    ids = _ids(64, 4096)
    return _on_meta(transformers.MixtralForCausalLM, config), {"input_ids": ids, "labels": ids, "use_cache": False}

"""Special settings of single architectures, and excluded architectures with the reason."""
from __future__ import annotations

from typing import Any

GIVEN: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": {"depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 32},
    "funnel": {"block_sizes": [1, 1], "d_inner": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16]},
    "swin": {"depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "swinv2": {"depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "wav2vec2-bert": {"vocab_size": 96},
    "wav2vec2-conformer": {"vocab_size": 96},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Arguments of a config."""
LEFT_OUT: dict[str, str] = {}
"""Architectures that are no case, with the reason."""

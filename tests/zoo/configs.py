"""Shrink a config of transformers: the defaults of its class, with every size made small and everything else left alone."""
from __future__ import annotations

import dataclasses
import re
from typing import Any

VOCABULARY, WIDTH, HEADS, LAYERS, EXPERTS, IMAGE, PATCH = 96, 32, 4, 2, 4, 32, 8

SIZES: list[tuple[str, Any]] = [
    (r"(.*_)?vocab_size(_.*)?|type_vocab_size_?|n_vocab", lambda old: min(old, VOCABULARY)),
    (r"vocab_size_or_config_json_file", VOCABULARY),
    (r"(num_key_value|num_kv|n_kv|.*num_key_value|num_query)_(heads|groups)", lambda old: min(old, 2)),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|n_head|num_encoder_attention_heads)", HEADS),
    (r"(.*_)?head_dim|d_kv|attention_head_size|.*_head_size|kv_channels|rotary_dim", 8),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|dim_ff|dim_feedforward|hidden_dim|inner_dim|ffn_size)",
     2 * WIDTH),
    (r"(moe|.*expert|mlp)_intermediate_size", WIDTH),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|embedding_dim|emb_dim|projection_dim|hidden_channels|width"
     r"|attention_hidden_size|conv_dim_out|encoder_hidden_dim|decoder_hidden_size|lru_width|pooler_hidden_size)", WIDTH),
    (r"(.*_)?(num_hidden_layers|n_layers?|num_layers|num_blocks|decoder_layers|encoder_layers|n_layer|num_hidden_groups)"
     r"|n_enc_layers|depth", lambda old: min(old, LAYERS)),
    (r"(num_local_experts|num_experts|n_routed_experts|num_routed_experts|moe_num_experts|.*_num_experts)", EXPERTS),
    (r"(num_experts_per_tok(en)?|moe_topk|moe_top_k|top_k|num_experts_per_token|experts_top_k|moe_k)", 2),
    (r"(n_group|topk_group|first_k_dense_replace|num_nextn_predict_layers)", 1),
    (r"(q|kv|o|qk)_lora_rank|.*_rank", 16),
    (r"(max_position_embeddings|max_seq_len|n_positions|max_source_positions|max_target_positions|seq_length|n_ctx|max_seq_length"
     r"|model_max_length|max_sequence_length)", lambda old: min(old, 64)),
    (r"(sliding_window|attention_window|local_attention|window_size_left)", lambda old: min(old, 8)),
    (r"image_size|input_size", IMAGE),
    (r"patch_size", lambda old: min(old, PATCH)),
    (r"(num_mel_bins|feature_size|num_mel_channels)", lambda old: min(old, 16)),
    (r"(mamba|ssm|lightning|linear|state|time_step)_?(d_state|state_size|n_heads|num_heads)", 4),
    (r"state_size|ssm_state_size|mamba_d_state", 8),
    (r"num_labels", 3),
]
"""(names, value): a number, or a function of the default. The first that matches a name in full decides."""

SWITCHED_OFF = ("use_cache", "apply_spec_augment")
"""Caches are for generation; masks of SpecAugment are longer than a small input."""


def tiny(config_class: type, **given: Any) -> Any:
    """A small config of `config_class`; `given` are arguments that it is made with whatever their size."""
    arguments = small_arguments(config_class)
    arguments.update(given)
    return config_class(**arguments)


def small_arguments(config_class: Any) -> dict[str, Any]:
    """The arguments that make a config small, those of the configs within it included."""
    arguments: dict[str, Any] = {}
    subconfigs = getattr(config_class, "sub_configs", {})
    for field in dataclasses.fields(config_class):
        default = field.default if field.default is not dataclasses.MISSING else (
            field.default_factory() if field.default_factory is not dataclasses.MISSING else None)
        if field.name in subconfigs and dataclasses.is_dataclass(subconfigs[field.name]):
            arguments[field.name] = small_arguments(subconfigs[field.name])
        elif (small := _small(field.name, default)) is not None and small != default:
            arguments[field.name] = small
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    arguments.update({name: False for name in SWITCHED_OFF if name in defaults})
    if defaults.get("num_key_value_heads") == defaults.get("num_attention_heads", 0):
        arguments["num_key_value_heads"] = HEADS  # attention that does not group its queries, such as DeepSeek's
    return arguments


def _small(name: str, default: Any) -> Any:
    if isinstance(default, bool) or default is None:
        return None
    if isinstance(default, int):
        if name.endswith("token_id") or name.endswith("token_index") or name.endswith("_idx"):
            return default if default < VOCABULARY else 3 + sum(map(ord, name)) % 17
        for names, value in SIZES:
            if re.fullmatch(names, name):
                return value(default) if callable(value) else value
        return None
    if isinstance(default, (list, tuple)) and default and all(isinstance(each, int) and not isinstance(each, bool)
                                                              for each in default):
        return _small_numbers(name, default)
    return None


def _small_numbers(name: str, default: Any) -> Any:
    """Of lists: widths of stages keep their ratio to the first, where they have one."""
    if re.fullmatch(r"depths?|num_blocks|layers|.*_layers|num_hidden_layers", name):
        return type(default)(min(each, 1) if len(default) > 2 else min(each, LAYERS) for each in default)
    if re.fullmatch(r"(hidden_sizes|embed_dims?|encoder_hidden_sizes|dims?|.*_channels|.*hidden_sizes|embedding_dims?)", name):
        return type(default)(max(8, 8 * round(16 * each / max(default) / 4)) for each in default)
    if re.fullmatch(r"(encoder_)?(num_heads|num_attention_heads)", name):
        return type(default)(min(each, 2) for each in default)
    if re.fullmatch(r"image_size", name):
        return type(default)(IMAGE for _ in default)
    if re.fullmatch(r"conv_dim", name):
        return type(default)(WIDTH for _ in default)
    return None

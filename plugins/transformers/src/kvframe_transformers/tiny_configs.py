"""The families of tiny models for tests, and the config of each: a few small layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

_SHARED: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW = 8
_CHUNK = 8
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

_LATENTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 8,
}
_DEEPSEEK_EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": _WINDOW},
    "gemma2": {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": _WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": _WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "cohere2": {"num_hidden_layers": 4, "sliding_window": _WINDOW},
    "deepseek_v2": {**_LATENTS, **_DEEPSEEK_EXPERTS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENTS, **_DEEPSEEK_EXPERTS},
    "minicpm3": dict(_LATENTS),
    "gemma3n_text": {
        "head_dim": 16,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": _WINDOW,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": _WINDOW,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
    },
    "glm4": {},
    "gpt2": {"n_layer": 3},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "granite": {"attention_multiplier": 0.3},
    # Its temperature increases within a short prompt.
    "llama4_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": 6,
        "attn_scale": 0.5,
        "use_qk_norm": True,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
    "mixtral": dict(_EXPERTS),
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": _WINDOW},
    "opt": {},
    "phi3": {},
    "qwen2": {},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, **_EXPERTS},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": _WINDOW},
}

_MAMBA2: Mapping[str, Any] = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}

_STATE_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "mamba": {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 2},
    "mamba2": {
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "num_hidden_layers": 2,
    },
    "bamba": {**_MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "head_dim": 16, "num_hidden_layers": 2, "mamba_d_ssm": 128},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        **_EXPERTS,
    },
    "kimi_linear": {
        **_LATENTS,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 2,
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
}

# Tables of positions are small, so that a test can reach their ends.
_ENCODER_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"pad_token_id": 0, "max_position_embeddings": 128},
    "roberta": {"pad_token_id": 1, "max_position_embeddings": 130},
    "distilbert": {
        "pad_token_id": 0,
        "max_position_embeddings": 128,
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 96,
    },
    "electra": {"pad_token_id": 0, "max_position_embeddings": 128, "embedding_size": 32},
    "xlm-roberta": {"pad_token_id": 1, "max_position_embeddings": 130},
    "camembert": {"pad_token_id": 1, "max_position_embeddings": 130},
    "eurobert": {"max_position_embeddings": 128, "mask_token_id": 3},
    "nomic_bert": {"pad_token_id": 0, "num_key_value_heads": 4, "max_position_embeddings": 128},
    "modernbert": {
        "pad_token_id": 0,
        "max_position_embeddings": 128,
        "local_attention": 8,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}

_ENCODER_DECODER: Mapping[str, Any] = {
    "vocab_size": 128,
    "d_model": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "pad_token_id": 0,
    "decoder_start_token_id": 3,
    "tie_word_embeddings": False,
}
_BART: Mapping[str, Any] = {
    **{f"{side}_layers": 3 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")},
}
_T5: Mapping[str, Any] = {"d_kv": 16, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
_GEMMA_SIDE: Mapping[str, Any] = {
    **_SHARED,
    "vocab_size": 129,
    "pad_token_id": 128,  # not a token of any test, because the model itself hides it
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": _WINDOW,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_ENCODER_DECODER_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bart": {**_BART, "max_position_embeddings": 256},
    "marian": {**_BART, "max_position_embeddings": 256},
    "mbart": {**_BART, "max_position_embeddings": 256},
    "mt5": {**_T5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    "pegasus": {**_BART, "max_position_embeddings": 256},
    # Distances reach the last bucket within a short prompt.
    "t5": {**_T5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    # Windows and full attention on both sides.
    "t5gemma": {"vocab_size": 129, "pad_token_id": 128, "encoder": dict(_GEMMA_SIDE), "decoder": dict(_GEMMA_SIDE)},
    "umt5": {**_T5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    # One second of audio.
    "whisper": {**_BART, "max_source_positions": 50, "max_target_positions": 128, "begin_suppress_tokens": None},
}

_GATED_DELTA: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

_MORE_STATE_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 2},
    "granitemoehybrid": {
        **_MAMBA2,
        **_EXPERTS,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "moe_intermediate_size": 32,
        **_EXPERTS,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "head_dim": 16,
        "chunk_size": 16,
    },
    "olmo_hybrid": dict(_GATED_DELTA),
    "qwen3_5_text": {"head_dim": 16, **_GATED_DELTA},
    "zamba2": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "adapter_rank": 8,
        "num_mem_blocks": 1,
    },
}

_HEADED_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {"head_dim": 16, **_DEEPSEEK_EXPERTS},
    "mellum": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "sliding_window": _WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        **_EXPERTS,
    },
}

_ALL_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **_CONFIGS,
    **_STATE_CONFIGS,
    **_MORE_STATE_CONFIGS,
    **_ENCODER_CONFIGS,
    **_HEADED_CONFIGS,
}

FAMILIES: tuple[str, ...] = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss")
"""The families, by transformers' ``model_type``, that every cross-distribution test covers."""

MORE_FAMILIES: tuple[str, ...] = tuple(sorted(set(_CONFIGS) - set(FAMILIES)))
"""Further families; the code names none of them."""

STATE_FAMILIES: tuple[str, ...] = tuple(_STATE_CONFIGS)
"""Families with layers that keep a recurrent or convolution state, alone or among layers that attend."""

MORE_STATE_FAMILIES: tuple[str, ...] = tuple(_MORE_STATE_CONFIGS)
"""Further families with such layers."""

ENCODER_DECODER_FAMILIES: tuple[str, ...] = ("bart", "t5", "t5gemma", "whisper")
"""Families with an encoder that are tested."""

MORE_ENCODER_DECODER_FAMILIES: tuple[str, ...] = tuple(
    sorted(set(_ENCODER_DECODER_CONFIGS) - set(ENCODER_DECODER_FAMILIES))
)
"""Further families with an encoder."""

ENCODER_FAMILIES: tuple[str, ...] = tuple(_ENCODER_CONFIGS)
"""Families of encoders: bidirectional attention, hidden states and no logits."""


def tiny_config(family: str, **overrides: Any) -> Any:
    """Return a transformers config of ``family`` with a few small layers.

    Args:
        family: One of the families in this file.
        overrides: Other values for fields of the config.
    """
    if family in _ENCODER_DECODER_CONFIGS:
        fields = {**_ENCODER_DECODER, **_ENCODER_DECODER_CONFIGS[family]}
    else:
        fields = {**_SHARED, **_ALL_CONFIGS[family]}
    return AutoConfig.for_model(family, **{**fields, **overrides})

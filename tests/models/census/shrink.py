"""Makes a tiny config of any model type: the fields that count or size something are replaced by small numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCAB = 128
"""The tokens of every tiny model."""

_LAYERS, _HEADS, _HEAD, _WIDTH, _MLP, _WINDOW = 4, 4, 16, 64, 96, 8

_SIZES: tuple[tuple[str, Any], ...] = (
    (r"(text_)?vocab_size(_per_layer_input)?|decoder_vocab_size|n_tokens", VOCAB),
    (r"(num|n)_(kv|key_value)_heads|num_key_value_heads|multi_query_group_num", 2),
    (r"index(er)?_n_heads", 16),  # with few, all products of a query and a key are often negative, and scores equal
    (r"(.*_)?(num_heads|attention_heads|n_heads|n_head|num_.*heads|n_.*heads)", _HEADS),
    (r"qk_rope_head_dim|partial_rotary_dim|rotary_dim|rope_head_dim|qk_rope_dim", 8),
    (r"kv_lora_rank|q_lora_rank|(.*_)?lora_rank|laurel_rank|time_step_rank|mamba_dt_rank|.*_rank|lora_r", 16),
    (
        r"v_head_dim|head_dim|global_head_dim|qk_nope_head_dim|qk_head_dim|(.*_)?head_dim|d_kv|d_head|mamba_headdim",
        _HEAD,
    ),
    (r"kv_channels|attention_head_size|(.*_)?head_size", _HEAD),
    (
        r"(num_)?(hidden|decoder|encoder|self_encoder|cross_decoder)_layers|num_hidden_layers|num_layers|n_layers?",
        _LAYERS,
    ),
    (r"(.*_)?num_(.*_)?(layers|blocks)|depth|(.*_)?n_layers?|num_hidden_groups|(en|de)coder_layers", _LAYERS),
    (r"(moe|shared|expert|.*experts?).*intermediate_size(_.*)?|(expert_)?ffn_hidden_size_?", 32),
    (r"(.*_)?(intermediate_size|ffn_dim|ff_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|hidden_dim|ffw_dim)(_mlp)?", _MLP),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|lru_width|emb_dim|dim|d_embed|width)", _WIDTH),
    (r"(.*_)?(projection_dim|projector_dim|proj_dim|output_dim|out_hidden_size|embedding_dim)", _WIDTH),
    (r"hidden_size_per_layer_input", 8),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_selected_experts|moe_top_k|expert_top_k|topk", 2),
    (r"(.*_)?(num|n)_(.*_)?experts|num_experts|num_local_experts|moe_num_experts", 4),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"(attention_)?(sliding_)?window(_size)?|local_attention|attention_window_size|sliding_window_size", _WINDOW),
    (r"attention_chunk_size", _WINDOW),
    # Fewer than the tokens of a prompt, so that a choice by content leaves some out.
    (r"index_topk", 8),
    (r"index_kpool|index_block_size", 4),
    (r"index_topk_blocks", 2),
    (r"state_size|mamba_d_state|ssm_state_size|d_state", 8),
    (r"(mamba_)?n_groups|mamba_ngroups", 2),
    (r"(mamba_)?chunk_size", 16),
    (r"max_position_embeddings|n_positions|max_target_positions|max_sequence_length|max_seq_len|seq_length|n_ctx", 512),
    (r"max_source_positions", 50),
    (r"image_size", 28),
    (r"patch_size", 14),
    (r"num_kv_shared_layers", 0),
    (r"first_k_dense_replace", 1),
)
_RULES = [(re.compile(name), value) for name, value in _SIZES]

_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
_TEXT_MROPE = {"text_config": {"rope_parameters": _MROPE}}

_GROUPED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_BY_LAYER = {"full_attention": _ROPE, "sliding_attention": _ROPE}

_GEMMA_3N = {
    "num_kv_shared_layers": 2,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "intermediate_size": [96] * 6,
    "activation_sparsity_pattern": [0.0] * 6,
}

_DOTS_3_NOTE = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}

_MINIMAX_M3 = {
    "index_n_heads": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "mlp_layer_types": ["dense", "sparse"] * 2,
}

_QWEN_4 = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

_CROSS_ATTENDING = {"is_decoder": True, "add_cross_attention": True}

SPECIAL: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"),
        _TEXT_MROPE,
    ),
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 588}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0}},
    "dots1": _GROUPED_EXPERTS,
    "deepseek_v2": _GROUPED_EXPERTS,
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 24},
    "mistral4": {"head_dim": 16, "qk_head_dim": 24},
    "blenderbot": {"encoder_layers": 4},
    "cohere_compass": {"text_config": {"rope_parameters": _BY_LAYER}},
    "cohere_compass_text": {"rope_parameters": _BY_LAYER},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"] * 2, **_GROUPED_EXPERTS}},
    "hunyuan_vl": {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [2, 2, 2, 2]}}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "perceiver": {"num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2},
    "luke": {"entity_vocab_size": 128, "entity_emb_size": 64},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "text_config": {"model_type": "granite", "attention_multiplier": 0.3},
    },
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "emu3": {"vocabulary_map": {"<image>": 5}, "vq_config": {"base_channels": 32}},
    # The towers of the library timm have attributes of their own.
    "fast_vlm": {"vision_config": {"model_type": "timm_wrapper", "hidden_size": 64}},
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "model_args": {"embed_dim": 64}}},
    "vision-encoder-decoder": {"decoder": _CROSS_ATTENDING},
    "encoder-decoder": {"decoder": _CROSS_ATTENDING},
    "speech-encoder-decoder": {"decoder": _CROSS_ATTENDING},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 64}},
    "vibevoice_asr": {
        f"{kind}_tokenizer_encoder_config": {"model_type": "vibevoice_acoustic_tokenizer_encoder", "num_filters": 1}
        for kind in ("acoustic", "semantic")
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 2]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qwen2_5_omni_thinker": {**_TEXT_MROPE, "vision_start_token_id": 6},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 6},
    "dots3_note_text": _DOTS_3_NOTE,
    "dots3_note": {"text_config": _DOTS_3_NOTE, "audio_config": {"adapter_input_size": _WIDTH}},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 2,
    },
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "mistral_large4": {"text_config": {"indexer_types": ["full", "shared"] * 2}},
    "minimax_m3_vl": {"text_config": _MINIMAX_M3},
    "minimax_m3_vl_text": _MINIMAX_M3,
    "qwen4_exp_text": _QWEN_4,
    "qwen4_exp": {"text_config": _QWEN_4},
    "glm5_next": {"text_config": {"num_key_value_heads": 4}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}}},
    "gemma3n_text": _GEMMA_3N,
    "gemma3n": {"text_config": _GEMMA_3N},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "rwkv": {"rescale_every": 2},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "esmc": {"num_key_value_heads": 4},
    "esm": {"vocab_size": 128, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 2},
    "funnel": {"architectures": ["FunnelModel"], "block_sizes": [2, 2], "block_repeats": [1, 1]},
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32], "hash_seed": 7},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "glm4v_moe": {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]}}},
}
"""Fields that the rules below do not find."""

_LISTS_OF_LAYERS = re.compile(
    r".*layer.*types?|no_rope_layers|layers_block_type|.*_pattern|block_types|attention_types"
)
_TOKEN = re.compile(r"(.*_)?token_(id|index)(_.*)?|(.*_)?(bos|eos|pad|sep|cls|mask|boi|eoi)_(token_)?id")


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """Return a config of ``model_type`` with small sizes; an error of its class passes.

    Args:
        model_type: A key of transformers' config mapping.
        overrides: Other values for fields.
    """
    return _shrunk(CONFIG_MAPPING[model_type], {**SPECIAL.get(model_type, {}), **overrides})


def _shrunk(config_class: Any, overrides: Mapping[str, Any]) -> Any:
    default = config_class()
    own = {field.name for field in dataclasses.fields(config_class)} - _BASE
    fields: dict[str, Any] = {}
    for name in own:
        value = _value(default, name)
        if isinstance(value, PreTrainedConfig):
            fields[name] = _shrunk(type(value), overrides.get(name, {}))
        elif (small := _small(name, value)) is not None:
            fields[name] = small
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            fields[name] = _shorter_sections(value)
    if "kv_lora_rank" in own and "num_attention_heads" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    layers = next((fields[name] for name in _COUNTS if name in fields), _LAYERS)
    for name in own:
        value = _value(default, name)
        if isinstance(value, list | tuple) and _LISTS_OF_LAYERS.fullmatch(name) and len(value) > 1:
            fields[name] = _alternating(value, layers)
    tokens = {name: _within(_value(default, name)) for name in own if _TOKEN.fullmatch(name)}
    flat = {name: value for name, value in overrides.items() if not isinstance(fields.get(name), PreTrainedConfig)}
    return config_class(**{**fields, **tokens, **flat})


_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "decoder_layers")
_BASE = {field.name for field in dataclasses.fields(PreTrainedConfig)}


def _shorter_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of rotary embeddings, with sections of a position's parts that fit a small head."""
    parameters: dict[str, Any] = {
        name: _shorter_sections(value) if isinstance(value, dict) else value for name, value in rope.items()
    }
    if sections := parameters.get("mrope_section"):
        pairs = int(_HEAD * (parameters.get("partial_rotary_factor") or 1.0)) // 2
        parts = [max(1, pairs * section // sum(sections)) for section in sections]
        parameters["mrope_section"] = [pairs - sum(parts[1:]), *parts[1:]]
    return parameters


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except (ValueError, RuntimeError):  # an attribute that differs between layers
        return vars(config).get(name, getattr(type(config), name, None))


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | None):
        return None
    if value is None and not re.fullmatch("head_dim", name):
        return None
    for pattern, small in _RULES:
        if pattern.fullmatch(name):
            return small if value is None or value > small or small == VOCAB else None
    return None


def _alternating(kinds: Any, count: int) -> list[Any]:
    """Return ``count`` entries in which each kind of a longer list occurs, as far as there are so many."""
    distinct = list(dict.fromkeys(tuple(kind) if isinstance(kind, list) else kind for kind in kinds))
    return [distinct[index % len(distinct)] for index in range(count)]


def _within(token: Any) -> Any:
    if isinstance(token, list):
        return [_within(member) for member in token]
    return VOCAB - 1 if isinstance(token, int) and token >= VOCAB else token

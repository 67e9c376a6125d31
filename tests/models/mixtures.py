"""A decoder of transformers' own layers of every kind: full, window and chunked attention, Mamba-2, latent attention.

No published model has all of them. The model only connects them, with norms, residuals and masks as in transformers'
decoders. It uses the ordinary adapter, which has no code for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralAttention

from kvframe import load_plugins
from kvframe.planning.recognise import find_adapter
from tests.models.serving import NUM_NEW_TOKENS, TinyModel

WINDOW, CHUNK = 8, 6

LAYER_TYPES = {
    "full": "full_attention",
    "window": "sliding_attention",
    "chunk": "chunked_attention",
    "mamba2": "linear_attention",
    "latent": "full_attention",
}
"""The kinds of layers, by transformers' names for their masks."""

_MIXERS = {
    "full": LlamaAttention,
    "window": MistralAttention,
    "chunk": LlamaAttention,
    "mamba2": BambaMixer,
    "latent": DeepseekV3Attention,
}


class MixtureConfig(DeepseekV3Config):  # type: ignore[misc]
    """The sizes of layers of every kind; ``mixture`` lists the kinds of the model's layers."""

    model_type = "kvframe_mixture"

    mixture: list[str] | None = None
    layer_types: list[str] | None = None
    sliding_window: int = WINDOW
    attention_chunk_size: int = CHUNK
    mlp_bias: bool = False
    mamba_n_heads: int = 8
    mamba_d_head: int = 16
    mamba_n_groups: int = 2
    mamba_d_state: int = 8
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_chunk_size: int = 16
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    def __post_init__(self, **kwargs: Any) -> None:
        self.mixture = list(self.mixture or [])
        self.layer_types = [LAYER_TYPES[kind] for kind in self.mixture]
        self.num_hidden_layers = len(self.mixture)
        super().__post_init__(**kwargs)


class MixtureLayer(nn.Module):
    def __init__(self, config: MixtureConfig, index: int) -> None:
        super().__init__()
        self.kind = config.mixture[index]
        self.mixer = _MIXERS[self.kind](config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, rotation: Any, mask: Any, **inputs: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        if self.kind == "mamba2":
            mixed = self.mixer(normed)
        else:
            mixed, _ = self.mixer(normed, position_embeddings=rotation, attention_mask=mask, **inputs)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MixtureForCausalLM(PreTrainedModel):  # type: ignore[misc]
    config_class = MixtureConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MixtureLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> CausalLMOutput:
        hidden_states = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        # By place, because transformers 5.24 has another name for the cache.
        inputs = (self.config, hidden_states, attention_mask, None, position_ids)
        masks = {
            "full_attention": create_causal_mask(*inputs),
            "sliding_attention": create_sliding_window_causal_mask(*inputs),
            "chunked_attention": create_chunked_causal_mask(*inputs),
            "linear_attention": None,
        }
        rotation = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            mask = masks[LAYER_TYPES[layer.kind]]
            hidden_states = layer(hidden_states, rotation, mask, position_ids=position_ids)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.lm_head(self.norm(hidden_states)[:, rows]))


AutoConfig.register(MixtureConfig.model_type, MixtureConfig)
AutoModelForCausalLM.register(MixtureConfig, MixtureForCausalLM)


def save_mixture(path: Path, mixture: Sequence[str], seed: int = 0) -> TinyModel:
    """Save and load a random model with layers of these kinds, whose attention is far from uniform.

    Args:
        path: The folder.
        mixture: Keys of ``LAYER_TYPES``.
        seed: Seed of the weights.
    """
    config = MixtureConfig(
        mixture=list(mixture),
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MixtureForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2 and "embed" not in name:
                    parameter.mul_(8.0)
                elif parameter.dim() < 2:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)
    registry = load_plugins().registry
    return TinyModel(path, find_adapter(path, registry).load(path, device="cpu", dtype="float32"), registry)


def dense_tokens(model: TinyModel, prompt: Sequence[int], num_new_tokens: int = NUM_NEW_TOKENS) -> tuple[int, ...]:
    """Return the tokens that follow a prompt greedily; each is computed by a dense forward of all tokens."""
    loaded: Any = model.loaded
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_new_tokens):
            tokens.append(int(loaded.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])

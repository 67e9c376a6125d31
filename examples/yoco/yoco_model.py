"""A small YOCO-style model in plain torch: the upper half of its layers reads the keys and values of one lower layer.

You Only Cache Once (arXiv 2405.05254) puts a *cross-decoder* on top of a *self-decoder*. The self-decoder's layers see
a window; its last one sees everything, and its keys and values are the model's only global cache. The cross-decoder's
layers have queries only: they all read that cache. While a prompt is prefilled, their results are
used for its last token only, so a forward may leave the other rows out of them.

In the paper the global keys and values are a projection of their own between the two halves. Here the self-decoder's
last layer makes them and attends to them as well, as in Gemma 3n: a cache belongs to the layer that writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attend(query, key, value)``: packed tokens ``[num_tokens, heads, head_size]`` each, to the query's shape."""

KeyValue = tuple[torch.Tensor, torch.Tensor]

_INIT_GAIN = 2.0  # of the weights that make queries and keys: large enough that attention is far from uniform


@attrs.frozen(kw_only=True)
class YocoConfig:
    """Sizes of a model.

    Attributes:
        vocab_size: Token ids are ``[0, vocab_size)``.
        hidden_size: Elements of a hidden state.
        intermediate_size: Width of the feed-forward part.
        num_self_layers: Layers of the self-decoder; the last one is global, the others see ``window`` tokens.
        num_cross_layers: Layers of the cross-decoder.
        num_heads: Query heads of every layer.
        num_kv_heads: Key and value heads of the self-decoder's layers.
        head_size: Elements of a query, key or value vector; even.
        window: Tokens that a windowed layer's query sees, its own included.
        rope_theta: Base of the rotary embedding's wavelengths.
        max_model_len: The most tokens of a request.
    """

    vocab_size: int = 128
    hidden_size: int = 64
    intermediate_size: int = 160
    num_self_layers: int = 4
    num_cross_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    window: int = 16
    rope_theta: float = 10_000.0
    max_model_len: int = 512


def attend_densely(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attend within one whole sequence: the attention of a layer until an engine replaces it.

    Args:
        query: ``[num_tokens, num_heads, head_size], device``.
        key: ``[num_tokens, num_kv_heads, head_size], device``.
        value: ``[num_tokens, num_kv_heads, head_size], device``.
        window: Tokens that a query sees, its own included; None for all before it.
    """
    position = torch.arange(len(key), device=key.device)
    distance = position[:, None] - position
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def rotations(positions: torch.Tensor, config: YocoConfig) -> torch.Tensor:
    """Return the rotary embedding's rotations (arXiv 2104.09864), ``[num_tokens, 1, head_size // 2], complex64``."""
    exponent = torch.arange(0, config.head_size, 2, device=positions.device) / config.head_size
    angles = positions[:, None, None] * config.rope_theta**-exponent
    return torch.polar(torch.ones_like(angles), angles)


def rotate(vectors: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring elements of ``vectors``, ``[num_tokens, heads, head_size]``, as pairs."""
    pairs = torch.view_as_complex(vectors.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(vectors.dtype)


class SelfAttention(nn.Module):
    """Attention with keys and values of its own; an engine's ``attend`` stores them in its cache."""

    def __init__(self, config: YocoConfig, window: int | None) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.query = nn.Linear(config.hidden_size, config.num_heads * config.head_size, bias=False)
        self.key = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_size, bias=False)
        self.value = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_size, bias=False)
        self.output = nn.Linear(config.num_heads * config.head_size, config.hidden_size, bias=False)
        self.attend: Attend = partial(attend_densely, window=window)

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, KeyValue]:
        """Return the output and the keys and values that it was computed with."""
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.head_size)) for project in (self.query, self.key, self.value)
        )
        key = rotate(key, rotation)
        attended = self.attend(rotate(query, rotation), key, value)
        return self.output(attended.flatten(1)), (key, value)


class CrossAttention(nn.Module):
    """Attention to the keys and values of another layer; it makes none of its own."""

    def __init__(self, config: YocoConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.query = nn.Linear(config.hidden_size, config.num_heads * config.head_size, bias=False)
        self.output = nn.Linear(config.num_heads * config.head_size, config.hidden_size, bias=False)
        self.attend: Attend = partial(attend_densely, window=None)

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor, shared: KeyValue) -> torch.Tensor:
        """Attend to ``shared``; an engine's ``attend`` reads its cache instead, which also holds all earlier tokens."""
        query = self.query(hidden).unflatten(-1, (-1, self.head_size))
        attended: torch.Tensor = self.output(self.attend(rotate(query, rotation), *shared).flatten(1))
        return attended


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: YocoConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``down(silu(gate) * up)``."""
        result: torch.Tensor = self.down(silu(self.gate(hidden)) * self.up(hidden))
        return result


class SelfDecoderLayer(nn.Module):
    """One layer of the self-decoder."""

    def __init__(self, config: YocoConfig, window: int | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = SelfAttention(config, window)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, KeyValue]:
        """Return the next hidden states, and the layer's keys and values."""
        attended, key_value = self.attention(self.attention_norm(hidden), rotation)
        hidden = hidden + attended
        return hidden + self.feed_forward(self.feed_forward_norm(hidden)), key_value


class CrossDecoderLayer(nn.Module):
    """One layer of the cross-decoder."""

    def __init__(self, config: YocoConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = CrossAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor, shared: KeyValue) -> torch.Tensor:
        """Return the next hidden states of the rows in ``hidden``, however many there are."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, shared)
        result: torch.Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return result


class Yoco(nn.Module):
    """The model. Without an engine it computes one sequence, with every token in one forward."""

    def __init__(self, config: YocoConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        windows = [config.window] * (config.num_self_layers - 1) + [None]
        self.self_decoder = nn.ModuleList(SelfDecoderLayer(config, window) for window in windows)
        self.cross_decoder = nn.ModuleList(CrossDecoderLayer(config) for _ in range(config.num_cross_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        cross_rows: torch.Tensor | None = None,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits.

        Args:
            input_ids: ``[num_tokens], int64, device``.
            positions: ``[num_tokens], int64, device``.
            cross_rows: ``[num_rows], int64, device``: the only tokens that the cross-decoder computes; None for all.
            logits_rows: ``[num_rows], int64, device``: of the cross-decoder's rows, those with logits; None for all.
        """
        hidden = self.embedding(input_ids)
        rotation = rotations(positions, self.config)
        for layer in self.self_decoder:
            hidden, shared = layer(hidden, rotation)
        if cross_rows is not None:
            hidden, rotation = hidden[cross_rows], rotation[cross_rows]
        for layer in self.cross_decoder:
            hidden = layer(hidden, rotation, shared)
        if logits_rows is not None:
            hidden = hidden[logits_rows]
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def make_random(config: YocoConfig, seed: int = 0) -> Yoco:
    """Return a float32 model with random weights, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    model = Yoco(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:  # the norms' vectors stay at one
                gain = _INIT_GAIN if name.endswith(("query.weight", "key.weight")) else 1.0
                weight.normal_(0.0, gain * weight.shape[1] ** -0.5, generator=generator)
    return model


def generate_densely(model: Yoco, prompt: Sequence[int], num_new_tokens: int) -> list[int]:
    """Return the likeliest tokens after a prompt, with the whole sequence computed again for each and no cache."""
    token_ids = list(prompt)
    for _ in range(num_new_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor(token_ids), torch.arange(len(token_ids)))
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :]

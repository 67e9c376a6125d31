"""A small model in plain torch: replace it by your own. It computes packed tokens, without a batch dimension."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend within one whole sequence; ``[num_tokens, num_heads, head_size]`` each."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)


class Layer(nn.Module):
    """One layer of attention, which calls ``attend``: the adapter puts kvframe's attention there."""

    def __init__(self, size: int, num_heads: int) -> None:
        """Make the projections."""
        super().__init__()
        self.num_heads = num_heads
        self.project = nn.Linear(size, 3 * size, bias=False)
        self.output = nn.Linear(size, size, bias=False)
        self.attend: Attention = attend_alone

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for packed hidden states, ``[num_tokens, size]``."""
        query, key, value = self.project(hidden).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        output: torch.Tensor = self.output(self.attend(query, key, value).flatten(1))
        return output


class Model(nn.Module):
    """Embeddings, layers of attention, and a head."""

    def __init__(self, vocab_size: int, size: int, num_heads: int, num_layers: int, max_model_len: int) -> None:
        """Make the weights."""
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, size)
        self.positions = nn.Embedding(max_model_len, size)
        self.layers = nn.ModuleList(Layer(size, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(size, vocab_size, bias=False)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of some rows of the packed tokens, or of all."""
        hidden = self.tokens(input_ids) + self.positions(positions)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: torch.Tensor = self.head(hidden if rows is None else hidden[rows])
        return logits

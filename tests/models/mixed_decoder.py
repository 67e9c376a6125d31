"""A small decoder in plain torch, with windows over its own tokens and over an optional encoder's output."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvframe import Engine, Setup, load_plugins
from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.model import LoadedModel, ModelInput
from tests.models.serving import make_stack

VOCAB, HIDDEN, HEADS, HEAD_SIZE, WINDOW, NUM_BLOCKS = 64, 32, 2, 16, 6, 2
SCALE = HEAD_SIZE**-0.5
MAX_INPUT_LEN = 40


class MixedDecoder(LoadedModel):
    """Each block attends in a window of its own tokens, then to all encoder tokens, if the request has any."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / math.sqrt(shape[0])

        self.embed, self.positions, self.head = (
            weight(VOCAB, HIDDEN) * 8,
            weight(256, HIDDEN) * 8,
            weight(HIDDEN, VOCAB),
        )
        self.encoder = weight(VOCAB, HIDDEN) * 8
        names = ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o")
        widths = {"k": HEAD_SIZE, "v": HEAD_SIZE, "cross_k": HEAD_SIZE, "cross_v": HEAD_SIZE}
        self.blocks = [{name: weight(HIDDEN, widths.get(name, HIDDEN)) for name in names} for _ in range(NUM_BLOCKS)]
        self.layers: Any = None
        self.states = torch.zeros(0, HIDDEN)
        self.encoded: list[int] = []
        query = {"num_heads": HEADS, "head_size": HEAD_SIZE, "scale": SCALE}
        cache = {"num_kv_heads": 1, "head_size": HEAD_SIZE}
        described = []
        for index in range(NUM_BLOCKS):
            window = {**cache, "window": WINDOW}
            described.append(LayerDescription(name=f"{index}.self", kind="sliding_window", options=window, query=query))
            described.append(
                LayerDescription(name=f"{index}.cross", kind="cross_attention", options=cache, query=query)
            )
        self.description = ModelDescription(
            name="mixed",
            layers=tuple(described),
            max_model_len=128,
            vocab_size=VOCAB,
            max_input_lens={"encoder": MAX_INPUT_LEN},
        )

    # --- the interface for an engine ----------------------------------------------------------------------------------

    def attach(self, layers: Any) -> None:
        self.layers = layers

    def detach(self) -> None:
        self.layers = None

    def self_check(self, run_packed: Any) -> None:
        """Do nothing: the tests check this model."""

    def prepare_input(self, sequence: str, value: Any) -> ModelInput | None:
        if value is None:
            return None
        return ModelInput(num_tokens=len(value), key=hashlib.sha256(bytes(value)).digest(), data=value)

    def start_token_ids(self, text: str | None = None) -> list[int]:
        return [1]

    def compute_inputs(self, inputs: Mapping[str, Sequence[ModelInput]]) -> None:
        new = inputs.get("encoder", ())
        self.encoded += [encoder_input.num_tokens for encoder_input in new]
        self.states = torch.cat(
            [torch.zeros(0, HIDDEN), *(self.encode_ids(encoder_input.data) for encoder_input in new)]
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        def attend(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            rows = query.view(-1, HEADS, HEAD_SIZE), key.view(-1, 1, HEAD_SIZE), value.view(-1, 1, HEAD_SIZE)
            attended: torch.Tensor = self.layers[name](*rows)
            return attended.reshape(-1, HIDDEN)

        return self.run(input_ids, positions, self.states, attend)[logits_indices]

    # --- the dense computation ----------------------------------------------------------------------------------------

    def encode_ids(self, ids: Sequence[int]) -> torch.Tensor:
        rows = self.encoder[list(ids)]
        return torch.tanh(rows + rows.mean(0))

    def run(self, ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor, attend: Any) -> torch.Tensor:
        hidden = self.embed[ids] + self.positions[positions]
        for index, block in enumerate(self.blocks):
            mine = torch.tanh(hidden)
            out = attend(f"{index}.self", mine @ block["q"], mine @ block["k"], mine @ block["v"])
            hidden = hidden + out @ block["o"]
            out = attend(
                f"{index}.cross",
                torch.tanh(hidden) @ block["cross_q"],
                states @ block["cross_k"],
                states @ block["cross_v"],
            )
            hidden = hidden + out @ block["cross_o"]
        return hidden @ self.head

    def dense(self, ids: Sequence[int], encoder: Sequence[int] | None) -> torch.Tensor:
        """Return the logits ``[num_tokens, vocab_size]`` of one request, without a cache."""

        def attend(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            if not len(key):
                return torch.zeros_like(query)
            scores = torch.einsum("qhd,kd->hqk", query.view(-1, HEADS, HEAD_SIZE), key) * SCALE
            if name.endswith("self"):
                distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
                scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), float("-inf"))
            return torch.einsum("hqk,kd->qhd", scores.softmax(-1), value).reshape(-1, HIDDEN)

        states = torch.zeros(0, HIDDEN) if encoder is None else self.encode_ids(encoder)
        return self.run(torch.tensor(ids), torch.arange(len(ids)), states, attend)

    def generate(self, ids: Sequence[int], encoder: Sequence[int] | None, num_new_tokens: int) -> tuple[int, ...]:
        """Return the tokens that continue ``ids`` greedily, without a cache."""
        tokens = list(ids)
        for _ in range(num_new_tokens):
            tokens.append(int(self.dense(tokens, encoder)[-1].argmax()))
        return tuple(tokens[len(ids) :])

    def engine(self, **options: Any) -> Engine:
        """Return an engine; freed pages read as NaN."""
        registry, stack = load_plugins().registry, make_stack(**options)
        return Engine(
            self,
            Setup.of(self.description, stack, registry, dtype="float32"),
            poison_freed=True,
        )

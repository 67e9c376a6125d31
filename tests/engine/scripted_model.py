"""A model without weights that continues every prompt by a script: text in, text out, one byte per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from kvframe import Engine, Setup, load_plugins
from kvframe.config.stack import Stack
from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.model import LoadedModel
from tests.stacks import tables_of

END = 0
MAX_MODEL_LEN = 64


class ScriptedModel(LoadedModel):
    """After the token at position ``p`` comes ``script[p + 1]``, for any token; ``broken`` spoils logits."""

    def __init__(self, script: str = "", tokenizer: bool = True) -> None:
        self.script = list(script.encode()) + [END] * MAX_MODEL_LEN
        self.tokenizer = tokenizer
        self.attached = False
        self.num_forwards = 0
        self.spoil: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self.description = ModelDescription(
            name="scripted",
            layers=(
                LayerDescription(
                    name="layer",
                    kind="full_attention",
                    options={"num_kv_heads": 1, "head_size": 4},
                    query={"num_heads": 1, "head_size": 4, "scale": 1.0},
                ),
            ),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=256,
            eos_token_ids=frozenset({END}),
        )

    def attach(self, layers: Any) -> None:
        self.attached = True

    def detach(self) -> None:
        self.attached = False

    def self_check(self, run_packed: Any) -> None:
        assert [(3, 256), (2, 256)] == [tuple(logits.shape) for logits in run_packed([[1, 2, 3], [4, 5]])]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        following = torch.tensor(self.script)[positions[logits_indices] + 1]
        logits = torch.nn.functional.one_hot(following, 256).float() * 2
        if self.spoil is not None:
            self.spoil(input_ids[logits_indices], logits)
        return logits

    def encode(self, text: str) -> list[int]:
        return list(text.encode()) if self.tokenizer else super().encode(text)

    def decode(self, token_ids: Sequence[int]) -> str | None:
        if not self.tokenizer:
            return None
        return bytes(token for token in token_ids if token != END).decode(errors="replace")

    def engine(self, *, plugins: Sequence[ModuleType] = (), **options: Any) -> Engine:
        """Return an engine with blocks of 4 tokens, and 16 KiB of cache unless ``memory`` is given."""
        if "cache_key" in options:
            options["key"] = options.pop("cache_key")
        stack = Stack.from_mapping(tables_of(**{"block_size": 4, "memory": 16 * 1024, **options}))
        registry = load_plugins(plugins=plugins).registry
        return Engine(self, Setup.of(self.description, stack, registry, dtype="float32"))

"""A loaded Hugging Face model whose attention runs through an engine's layers: what an engine asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvframe.contract import LoadedModel, ModelDescription, ModelError, Pooling, PredictionHeads
from kvframe_transformers.attached import AttachedModel
from kvframe_transformers.checkpoint import one_sentence
from kvframe_transformers.decoding import decode_as_they_come
from kvframe_transformers.hidden_states import HiddenStates
from kvframe_transformers.prediction_heads import load_heads
from kvframe_transformers.routing import RunningStep, running
from kvframe_transformers.self_check import RunPacked, compare_runs
from kvframe_transformers.sentence_transformers import read_pooling


class TransformersModel(AttachedModel):
    """Runs a transformers model on packed batches, with its tokenizer, its hidden states and its prediction heads."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        description: ModelDescription,
        folder: Path | None = None,
        first_position: int = 0,
    ) -> None:
        """Take a model in evaluation mode.

        Args:
            model: As for ``AttachedModel``, as are the description, the folder and the first position.
            tokenizer: Its tokenizer, or None.
            description: Its layers.
            folder: The folder that it was loaded from.
            first_position: The model's number for the position of a prompt's first token.
        """
        super().__init__(model, description, folder, first_position)
        self.tokenizer = tokenizer

    def without_head(self) -> LoadedModel:
        """Return the same model without its head; it gives its last hidden states."""
        if not self.description.generates:
            return self
        description = attrs.evolve(self.description, generates=False)
        headless = TransformersModel(self.model, self.tokenizer, description, self._folder, self._first_position)
        headless.packs_weights = self.packs_weights
        return headless

    def pooling(self) -> Pooling | None:
        """Return the pooling in the checkpoint's files for sentence-transformers; None if it has none."""
        return None if self._folder is None else read_pooling(self._folder)

    def tokenizer_json(self) -> str | None:
        """Return the fast tokenizer as JSON, without padding and truncation; None if there is none."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        plain_backend = type(backend).from_str(backend.to_str())
        plain_backend.no_padding()
        plain_backend.no_truncation()
        return str(plain_backend.to_str())

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Run one packed step; the attention layers already hold the step's metadata.

        Args:
            input_ids: ``[num_tokens], int64, device``.
            positions: ``[num_tokens], int64, device``.
            logits_indices: ``[num_wanted], int64, device``: the rows of the packed batch whose logits are wanted.

        Returns:
            Logits ``[num_wanted, vocab_size], device``; if the step's last layers keep only some rows, of these rows.
            For a model that does not generate, hidden states ``[num_wanted, hidden_size]``.
        """
        layers, mode = self._layers, self._mode
        if layers is None or mode is None:
            raise ModelError(f"{self.description.name} is not attached to an engine; make an engine for it")
        kept_rows = layers.kept_rows
        with (
            torch.inference_mode(),
            mode.on(),
            running(RunningStep(self._routes, positions, kept_rows, mode.by_content)),
        ):
            if kept_rows is not None:
                return self._run(input_ids, positions)
            if self._keeps_logits:
                return self._run(input_ids, positions, logits_to_keep=logits_indices)
            return self._run(input_ids, positions)[logits_indices]

    def can_give_hidden_states(self) -> bool:
        """Return whether the model has a head, whose input can be noted."""
        return self.description.generates and self.model.get_output_embeddings() is not None

    def give_hidden_states(self, *, of_all_tokens: bool = False) -> None:
        """Note in each step the input of the model's head, or the output of its body."""
        module = self.model.get_decoder() if of_all_tokens else self.model.get_output_embeddings()
        self._noted = HiddenStates(module, takes_output=of_all_tokens)

    def forward_with_hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one packed step, and return what was noted beside the logits.

        Args:
            input_ids: As for ``forward``.
            positions: As for ``forward``.
            logits_indices: As for ``forward``.

        Returns:
            The logits, and ``[num_logits_rows, hidden_size]`` of the same rows, or ``[num_tokens, hidden_size]``.

        Raises:
            ModelError: The model does not call its head.
        """
        assert self._noted is not None
        logits = self.forward(input_ids, positions, logits_indices)
        rows = self._noted.take()
        if rows is None:
            raise ModelError(
                f"{self.description.name} does not call its output embeddings, so it has no hidden states; choose "
                "another proposer"
            )
        # A model that always computes the logits of all rows gives those that are wanted.
        are_wanted = self._noted.takes_output or len(rows) == len(logits)
        return logits, rows if are_wanted else rows[logits_indices]

    def load_prediction_heads(self) -> PredictionHeads | None:
        """Load the heads from the folder of the model's checkpoint; on rank 0 only, with the help of the others.

        Raises:
            ModelError: It has no weights of them.
        """
        return load_heads(self.model, self.description)

    def self_check(self, run_packed: RunPacked) -> None:
        """Compare a packed run with the model's own plain forward; raise ``ModelError`` if logits differ.

        Args:
            run_packed: ``run_packed(prompts)`` returns the logits ``[len(prompt), vocab_size]`` of each prompt,
                computed through the attached layers together; ``run_packed(prompts, last_only=True)`` returns
                those of its last token, ``[1, vocab_size]``.
        """
        assert self._layers is not None
        assert self._mode is not None
        modules, layers = list(self._modules().items()), self._layers
        with self._mode.temperatures.in_short_steps():
            compare_runs(
                self.description, self.model, modules, run_packed, self._run_plain, layers.skipped, layers.dtypes
            )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, with the special tokens that the tokenizer adds."""
        if self.tokenizer is None:
            raise self._no_tokenizer()
        return list(self.tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of the tokenizer's chat template, with the start of the model's answer."""
        if self.tokenizer is None:
            raise self._no_tokenizer()
        if not self.tokenizer.chat_template:
            return super().encode_chat(messages)
        try:
            conversation = [dict(message) for message in messages]
            return list(self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))
        except Exception as error:  # a template is a program of the checkpoint's
            raise ModelError(f"the chat template of {self.description.name} failed: {one_sentence(error)}") from error

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ``token_ids`` without special tokens; None if the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_with_special_tokens(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ``token_ids`` with special tokens; None if the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def decode_stream(
        self, token_ids: Sequence[int], *, special_tokens: bool = False
    ) -> Callable[[Sequence[int], bool], str]:
        """Return a function that decodes new tokens, in the way of the tokenizer's kind.

        Args:
            token_ids: The prompt.
            special_tokens: Whether special tokens have a text.
        """
        return decode_as_they_come(self.tokenizer, token_ids, special_tokens)

    def _run_plain(self, prompt: list[int]) -> torch.Tensor:
        """Return the logits ``[len(prompt), vocab_size]``, or hidden states, of the model's own attention."""
        assert self._mode is not None
        ids, inputs = torch.tensor(prompt, device=self.model.device), {}
        if self.description.bidirectional_prompts and self._takes_token_types:
            inputs["token_type_ids"] = torch.zeros_like(ids)[None]  # the type of a prompt's tokens
        with torch.inference_mode(), self._mode.off():
            return self._run(ids, None, **inputs)

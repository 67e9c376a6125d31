"""Encoder-decoder models: transformers runs the encoder, and an engine's layers run the decoder's attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvframe.contract import (
    ENCODER,
    LoadedModel,
    ModelDescription,
    ModelError,
    ModelInput,
    RequestError,
)
from kvframe_transformers.discovery import takes_decoder_positions
from kvframe_transformers.encoders import choose_attention_anew
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.model_inputs import EncoderStates, features_input, ids_input
from kvframe_transformers.recording import EncoderOutput, width_of_encoder
from kvframe_transformers.self_check import RunPacked, compare_runs
from kvframe_transformers.without_values import WithoutValues

_DECODER_POSITIONS = "decoder_position_ids"
_CHECK_LENS = range(3, 24)
"""Encoder tokens of the self-check's prompts: fewer and more than a block, and than the decoder's own tokens."""


def input_name_of(model: Any) -> str:
    """Return the name of the argument for the encoder's input: the encoder's own one if it takes not the model's."""
    name, encoder = model.main_input_name, model.get_encoder()
    encoder_input = getattr(encoder, "main_input_name", name)
    return str(name if name in inspect.signature(encoder.forward).parameters else encoder_input)


class EncoderDecoderModel(TransformersModel):
    """Runs a transformers encoder-decoder model.

    transformers' own encoder encodes each new input once. In a step, the decoder gets only the states of the new
    inputs, packed, so that its cross-attention layers produce exactly the keys and values that have to be stored.

    Invariant: as for a model without encoder; in a step, hooks pass true positions to the decoder's modules.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        description: ModelDescription,
        build_without_weights: Callable[[], PreTrainedModel],
        folder: Path | None = None,
    ) -> None:
        """Take a model in evaluation mode.

        Args:
            model: The model, with its weights, on its device.
            tokenizer: Its tokenizer, or None.
            description: Its decoder's layers, as planned.
            build_without_weights: Builds it on the meta device, to find how many tokens features of a shape become.
            folder: As for ``TransformersModel``.
        """
        super().__init__(model, tokenizer, description, folder)
        self._encoder: Any = self.model.get_encoder()
        self._build_without_weights = build_without_weights
        self._num_tokens: dict[torch.Size, int] = {}
        self._takes_decoder_positions = takes_decoder_positions(model)
        self._input_name = input_name_of(model)
        self._no_states = torch.zeros(1, 2, width_of_encoder(model), device=model.device, dtype=model.dtype)
        """Modules cannot take no row, and a compiler makes another program for one row. The output is not used."""
        self._states = self._no_states

    def without_head(self) -> LoadedModel:
        """Raise ``ModelError``: an embedding could be made of the encoder's hidden states or of the decoder's."""
        raise ModelError(
            f"{self.description.name} makes no embeddings: it has an encoder and a decoder, and nothing says whose "
            "hidden states to take"
        )

    # --- the inputs of requests ---------------------------------------------------------------------------------------

    def prepare_input(self, sequence: str, value: Any) -> ModelInput | None:
        """Return the encoder's input: the token ids of a text, or the given ids or features.

        Args:
            sequence: ``"encoder"``.
            value: Text, token ids, or features as a tensor or an array.

        Raises:
            RequestError: ``value`` is None, or not an input of the encoder.
            ModelError: ``value`` is text, and the model has no tokenizer.
        """
        if sequence != ENCODER:
            return super().prepare_input(sequence, value)
        name, takes = self.description.name, self._input_name
        reads_ids = takes == "input_ids"
        if value is None:
            expected_input = "text or token ids" if reads_ids else f"features ({takes})"
            raise RequestError(
                f"{name} needs an input for its encoder: Prompt(encoder=…) with {expected_input}", code="missing_input"
            )
        if not reads_ids:
            if isinstance(value, str | list | tuple):
                raise RequestError(
                    f"the encoder of {name} reads features ({takes}), a tensor or an array of numbers, not text or "
                    "token ids",
                    code="bad_input",
                )
            return features_input(value, self._num_tokens_of)
        if isinstance(value, str):
            value = self.encode(value)
        return ids_input(value, self._encoder.get_input_embeddings().num_embeddings)

    def start_token_ids(self, text: str | None = None) -> list[int]:
        """Return the decoder's start token, then the token that the generation config forces, or the ids of a text.

        Args:
            text: The first text of the decoder.

        Raises:
            ModelError: The configs name no start token, or there is a text and no tokenizer.
        """
        generation, config = self.model.generation_config, self.model.config
        candidates = (
            generation.decoder_start_token_id,
            getattr(config, "decoder_start_token_id", None),
            generation.bos_token_id,
        )
        start = next((token for token in candidates if isinstance(token, int)), None)
        if start is None:
            return super().start_token_ids(text)
        if text is not None:
            if self.tokenizer is None:
                raise self._no_tokenizer()
            return [start, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        forced_token = generation.forced_bos_token_id
        return [start] if forced_token is None else [start, forced_token]

    def compute_inputs(self, inputs: Mapping[str, Sequence[ModelInput]]) -> None:
        """Encode new inputs, those of equal shape together, for the ``forward`` that follows.

        Args:
            inputs: By sequence, in the order of their requests.
        """
        new = inputs.get(ENCODER, ())
        self._states = torch.cat(self._encode(new)).unsqueeze(0) if new else self._no_states

    def _encode(self, inputs: Sequence[ModelInput]) -> list[torch.Tensor]:
        """Return the encoder's states of each input, ``[num_tokens, hidden_size]``."""
        states: list[Any] = [
            model_input.data.states if isinstance(model_input.data, EncoderStates) else None for model_input in inputs
        ]
        indices_by_shape: dict[torch.Size, list[int]] = {}
        for index, model_input in enumerate(inputs):
            if states[index] is None:
                indices_by_shape.setdefault(model_input.data.shape, []).append(index)
        assert self._mode is not None
        with torch.inference_mode(), self._mode.off():
            for indices in indices_by_shape.values():
                batch = torch.stack([inputs[index].data for index in indices]).to(self.model.device)
                batch = batch.to(self.model.dtype) if batch.is_floating_point() else batch
                choose_attention_anew(self._encoder)
                output = self._encoder(**{self._input_name: batch}).last_hidden_state
                for index, input_states in zip(indices, output, strict=True):
                    states[index] = input_states
        return states

    def _num_tokens_of(self, shape: torch.Size) -> int:
        """Return the number of tokens that the encoder makes of features: a run without data, once for each shape."""
        if shape not in self._num_tokens:
            encoder = self._build_without_weights().get_encoder()
            features = torch.empty(1, *shape, device="meta", dtype=encoder.dtype)
            with torch.no_grad(), WithoutValues():
                output = encoder(**{self._input_name: features})
            self._num_tokens[shape] = output.last_hidden_state.shape[1]
        return self._num_tokens[shape]

    # --- serving ------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove what an engine needs of the model. Safe to call twice."""
        super().detach()
        self._states = self._no_states

    def self_check(self, run_packed: RunPacked) -> None:
        """Compare a packed run of the decoder with its own plain forward, on random states instead of an encoder's.

        Args:
            run_packed: Runs prompts with their inputs through the attached layers together.
        """

        def packed(
            prompts: list[list[int]], last_only: bool = False, inputs: Sequence[Mapping[str, ModelInput]] = ()
        ) -> list[torch.Tensor]:
            return run_packed(prompts, last_only, [{ENCODER: self._check_input(prompt)} for prompt in prompts])

        assert self._layers is not None
        modules, dtypes = list(self._modules().items()), self._layers.dtypes
        compare_runs(self.description, self.model, modules, packed, self._run_plain, stored=dtypes)

    def _check_input(self, prompt: Sequence[int]) -> ModelInput:
        """Return random states for a prompt, which are equal in each call."""
        generator = torch.Generator().manual_seed(prompt[0])
        num_tokens = _CHECK_LENS[prompt[0] % len(_CHECK_LENS)]
        num_tokens = min(num_tokens, self.description.max_input_lens[ENCODER])
        states = torch.randn(num_tokens, self._no_states.shape[-1], generator=generator).to(self._no_states)
        return ModelInput(num_tokens=num_tokens, key=str(prompt[0]).encode(), data=EncoderStates(states))

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor | None, **inputs: Any) -> torch.Tensor:
        # A decoder that takes no positions gets them through the hooks.
        if positions is not None and self._takes_decoder_positions:
            inputs[_DECODER_POSITIONS] = positions.unsqueeze(0)
        return self._decode(input_ids, self._states, **inputs)

    def _run_plain(self, prompt: list[int]) -> torch.Tensor:
        states = self._check_input(prompt).data.states
        assert self._mode is not None
        with torch.inference_mode(), self._mode.off():
            return self._decode(torch.tensor(prompt, device=self.model.device), states.unsqueeze(0))

    def _decode(self, input_ids: torch.Tensor, states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        output = self._running_body(
            encoder_outputs=EncoderOutput(last_hidden_state=states),
            decoder_input_ids=input_ids.unsqueeze(0),
            use_cache=False,
            **inputs,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

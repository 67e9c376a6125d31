"""Models that give hidden states instead of logits: encoders, and decoders that were saved without a head."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForTextEncoding, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)

from kvframe.contract import ModelError

# Their methods have no type hints.
_Body: Any = AutoModel
_TextEncoder: Any = AutoModelForTextEncoding

_PROBE_TOKENS = 4


def text_attribute(config: Any, name: str) -> Any:
    """Return what a config says of its text: its text config, or itself if that does not say; None if neither does."""
    text = getattr(config.get_text_config(decoder=True), name, None)
    return getattr(config, name, None) if text is None else text


def has_table_of_waves(module: nn.Module) -> bool:
    """Return whether a module returns rows of a table of sines for positions that it counts itself, from its tokens."""
    return hasattr(module, "create_position_ids_from_input_ids") and isinstance(
        getattr(module, "weights", None), torch.Tensor
    )


def computes_waves(module: nn.Module) -> bool:
    """Return whether a module without weights computes sines for positions, those that it gets or counts itself."""
    is_for_positions = type(module).__name__.endswith("SinusoidalPositionalEmbedding")
    is_bare = next(module.parameters(), None) is None and next(module.buffers(), None) is None
    return is_for_positions and is_bare and "position_ids" in inspect.signature(module.forward).parameters


def counts_positions(module: nn.Module) -> bool:
    """Return whether a module is a table of positions that it counts itself, from the number of tokens."""
    parameters = inspect.signature(module.forward).parameters if isinstance(module, nn.Embedding) else {}
    return bool(_EARLIER_TOKENS & parameters.keys()) and "position_ids" not in parameters


_EARLIER_TOKENS = {"past_key_values_length", "cache_length"}
"""The parameters for a number of earlier tokens: the second since transformers 5.24."""


def attends_sparsely(model: Any) -> bool:
    """Return whether a model attends to all tokens of short texts, and to some of long ones (BigBird)."""
    return hasattr(model, "set_attention_type") and bool(model.config.attention_type == "block_sparse")


def choose_attention_anew(model: Any) -> None:
    """Let such a model choose by its next text; after a short one, it would attend to all tokens of any text."""
    if attends_sparsely(model):
        model.set_attention_type("block_sparse")


def is_text_encoder(config: Any) -> bool:
    """Return whether a config's model is the encoder of an encoder-decoder model, saved alone, such as T5's."""
    encoder = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(config.model_type)
    if encoder not in (config.architectures or ()) or type(config) not in _Body._model_mapping:
        return False
    return encoder not in {body.__name__ for body in _bodies_of(config)}


def generates(config: Any) -> bool:
    """Return whether a config's model gives logits for a next token.

    A family with a masked language model is an encoder, unless the config says that the model is a decoder. In other
    families, a checkpoint that was saved without a head gives hidden states.
    """
    architectures, family = set(config.architectures or ()), config.model_type
    if is_text_encoder(config):
        return False
    if config.is_encoder_decoder or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family) in architectures:
        return True
    if family in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return bool(getattr(config, "is_decoder", False))
    if not architectures or type(config) not in _Body._model_mapping:
        return True
    bodies = _bodies_of(config)
    # In models of text and images, the body includes the head.
    return not architectures <= {body.__name__ for body in bodies} or any(body.can_generate() for body in bodies)


def _bodies_of(config: Any) -> tuple[Any, ...]:
    body_class = _Body._model_mapping[type(config)]
    return tuple(body_class) if isinstance(body_class, tuple | list) else (body_class,)


class BodyLoader:
    """Creates the body of a config's model, like transformers' auto classes, but without any head or pooler."""

    def __init__(self, config: Any) -> None:
        """Keep the config of a model that does not generate."""
        self._auto = _TextEncoder if is_text_encoder(config) else _Body
        # The pooler's output is not used, and checkpoints with a head have no pooler.
        takes_it = (
            self._auto is _Body and "add_pooling_layer" in inspect.signature(_bodies_of(config)[0].__init__).parameters
        )
        self._options: dict[str, Any] = {"add_pooling_layer": False} if takes_it else {}

    def from_config(self, config: Any, **options: Any) -> PreTrainedModel:
        """Return the model with random weights."""
        model: PreTrainedModel = self._auto.from_config(config, **self._options, **options)
        return model

    def from_pretrained(self, path: str, **options: Any) -> Any:
        """Return what transformers' auto classes return: the model with a folder's weights, or also how they loaded."""
        return self._auto.from_pretrained(path, **self._options, **options)


def num_unused_positions(model: PreTrainedModel) -> int:
    """Return the number of unused first rows in a table of positions; RoBERTa's positions start after the padding."""
    for module in model.modules():
        if has_table_of_waves(module):
            return int(module.padding_idx) + 1
    length = getattr(model.config, "max_position_embeddings", None)
    for table in filter(_is_table, model.modules()):
        is_of_positions = table.weight.shape[0] == length and table is not model.get_input_embeddings()
        if is_of_positions and table.padding_idx is not None:
            return int(table.padding_idx) + 1
    return 0


def _is_table(module: nn.Module) -> bool:
    """Return whether a module looks up rows by ids: an ``nn.Embedding``, or a class like it (I-BERT's)."""
    weight = getattr(module, "weight", None)
    is_alike = hasattr(module, "padding_idx") and isinstance(weight, torch.Tensor) and weight.dim() == 2
    return isinstance(module, nn.Embedding) or is_alike


def find_first_position(model: PreTrainedModel) -> int:
    """Return the model's number for the position of a prompt's first token, found by its look-ups for a prompt.

    Args:
        model: The model, with its weights; its own forward runs.

    Raises:
        ModelError: The number does not fit the size of the model's table.
    """
    # Neighbouring tokens are equal, so only positions increase.
    padding = text_attribute(model.config, "pad_token_id")
    token = 0 if padding != 0 else 1
    ids = torch.full((1, _PROBE_TOKENS), token, device=model.device)
    with torch.inference_mode(), _lookups(model) as lookups:
        model(input_ids=ids)
    counting = torch.arange(_PROBE_TOKENS)
    first_rows = [(table, int(ids[0])) for table, ids in lookups if torch.equal(ids - ids[0], counting)]
    unused = num_unused_positions(model)
    first = first_rows[0][1] if first_rows else unused if any(map(has_table_of_waves, model.modules())) else 0
    length = getattr(model.config, "max_position_embeddings", None)
    # A table may have as many more rows as positions begin later (Nystromformer).
    is_longer = (
        bool(first_rows) and unused == 0 and length is not None and first_rows[0][0].weight.shape[0] >= first + length
    )
    if first != unused and not is_longer:
        raise ModelError(
            f"{type(model).__name__} counts positions from {first}, and its table has {unused} rows before the first "
            "position; only a model adapter of its own can serve it"
        )
    return first


@contextmanager
def _lookups(model: nn.Module) -> Iterator[list[tuple[Any, torch.Tensor]]]:
    """Collect the tables that are read for one prompt, each with its indices, ``[num_tokens], int64, host``."""
    lookups: list[tuple[Any, torch.Tensor]] = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].numel() == _PROBE_TOKENS:
            lookups.append((module, inputs[0].reshape(-1).cpu()))

    tables = [module for module in model.modules() if _is_table(module)]
    handles = [table.register_forward_pre_hook(note) for table in tables]
    try:
        yield lookups
    finally:
        for handle in handles:
            handle.remove()

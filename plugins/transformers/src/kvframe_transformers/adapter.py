"""The model adapter for Hugging Face checkpoints."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvframe.contract import (
    ENCODER,
    LayerDescription,
    LoadedModel,
    ModelAdapter,
    ModelDescription,
    ModelError,
    ModelInMemory,
    ModelShare,
    UnknownNameError,
)
from kvframe_transformers.alibi import DEFAULT_POSITIONS
from kvframe_transformers.alibi import PARAMETER as SLOPES
from kvframe_transformers.checkpoint import (
    build_without_weights,
    eos_token_ids,
    load_tokenizer,
    load_weights,
    max_encoder_len,
    max_model_len,
    quiet,
    read_config,
    read_config_file,
)
from kvframe_transformers.discovery import OwnMaskError, discover_layers, sees_whole_prompts
from kvframe_transformers.encoder_alone import EncoderAlone
from kvframe_transformers.encoder_decoder import EncoderDecoderModel
from kvframe_transformers.encoders import find_first_position, generates, num_unused_positions, text_attribute
from kvframe_transformers.generation import read_generation_config, sampling_of, warn_of_others
from kvframe_transformers.hub import find_repository
from kvframe_transformers.in_memory import build_like, config_of, generation_eos_token_ids, place_of
from kvframe_transformers.known_values import KnownValues
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.plugin import PACK_WEIGHTS, SETTINGS
from kvframe_transformers.prediction_heads import describe_heads
from kvframe_transformers.ranks import num_ranks, options_of_ranks, share_of_rank, what_ranks_lack
from kvframe_transformers.text_part import class_without, idle_parts, remove_parts, without_timm
from kvframe_transformers.weight_bytes import count_weights, what_lacks

UNLIMITED = 1 << 20
"""The most tokens of a request if a model has no positions: its states have any length, but tables need a limit."""

_log = logging.getLogger("kvframe")

_LONGEST_OWN_MASK = 2048
"""The most positions of a model whose modules make masks themselves: the whole mask is read."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class TransformersAdapter(ModelAdapter):
    """Reads folders (or their config.json) in the format of ``save_pretrained``, by transformers' own classes."""

    _described: tuple[Path, _Checkpoint] | None = None
    """The path that was described last, and what it holds."""

    def recognises(self, path: Path) -> bool:
        """Return whether ``path`` has a config that names a model type or architectures."""
        config = read_config_file(path)
        return config is not None and ("model_type" in config or "architectures" in config)

    def find(self, name: str, *, weights: bool) -> Path | None:
        """Return the folder of a repository on the Hugging Face Hub; download what is missing."""
        return find_repository(name, weights=weights)

    def describe(self, path: Path) -> ModelDescription:
        """Read the layers by a forward of the model without weights; raise ``ModelError`` if that is not possible."""
        self._described = path, _Checkpoint.read(path)
        return self._described[1].description

    def dtype_of(self, path: Path) -> str | None:
        """Return the dtype that the config names, of the whole model or of its text part."""
        config: Any = read_config(path)
        config_dtype = config.dtype or config.get_text_config(decoder=True).dtype
        if config_dtype is None and getattr(config, "quantization_config", None):
            return "bfloat16"  # what is beside the quantized weights has 16 bits
        name = str(config_dtype).removeprefix("torch.")
        return name if name in _DTYPES else None

    def share_of_rank(self, path: Path, description: ModelDescription, *, dtype: str, num_ranks: int) -> ModelShare:
        """Count the weights of a rank from the config, and divide the layers as ``load`` does.

        If ``load`` cannot divide them, a rank has the heads that other engines would give it.
        """
        if self._described is None or self._described[0] != path:
            self.describe(path)
        assert self._described is not None
        config, refusal = _read_config(path), None
        model = build_without_weights(config, description.name)
        remove_parts(model, self._described[1].idle_parts)
        try:
            layers = share_of_rank(description, model, num_ranks).layers
        except ModelError as error:
            layers, refusal = tuple(layer.share_of_heads(num_ranks) for layer in description.layers), str(error)
        weights = count_weights(model, path if path.is_dir() else None, dtype, num_ranks)
        return ModelShare(
            layers=layers,
            weight_bytes=weights.num_bytes,
            num_parameters=weights.num_parameters,
            weights=weights.words,
            refusal=refusal,
            lacks=(*what_lacks(config), *what_ranks_lack(model, num_ranks)),
        )

    def load(self, path: Path, *, device: str, dtype: str) -> LoadedModel:
        """Load the weights and the tokenizer of a folder; raise ``ModelError`` if the checkpoint is incomplete.

        If torchrun started several processes, each loads its share of the weights, by the model's own plan.
        """
        return self._load(path, device, dtype, num_ranks())

    def load_whole(self, path: Path, *, device: str, dtype: str) -> LoadedModel:
        """Load all weights into this process, as ``load`` does if there is no other process."""
        return self._load(path, device, dtype, 1)

    def _load(self, path: Path, device: str, dtype: str, size: int) -> LoadedModel:
        """Load the share of one of ``size`` processes."""
        if not path.is_dir():
            raise ModelError(f"{path} is a config without weights; to run a model, give the folder of its checkpoint")
        if dtype not in _DTYPES:
            raise UnknownNameError("model dtype", dtype, _DTYPES)
        checkpoint, config = _Checkpoint.read(path), _read_config(path)
        description = checkpoint.description
        warn_of_others(read_generation_config(path), description.name)
        options: dict[str, Any] = {}
        if size > 1:
            meta_model: Any = build_without_weights(config, description.name)
            description, options = share_of_rank(description, meta_model, size), options_of_ranks(meta_model, device)
        model = checkpoint.load(path, config, device, _DTYPES[dtype], options)
        tokenizer = load_tokenizer(path)
        loaded_model: TransformersModel
        if config.is_encoder_decoder:
            build = partial(build_without_weights, config, description.name)
            loaded_model = EncoderDecoderModel(model, tokenizer, description, build, path)
        else:
            loaded_model = _one_sequence_model(model, tokenizer, description, path)
        loaded_model.packs_weights = SETTINGS[PACK_WEIGHTS]
        return loaded_model

    def adopt(self, model: Any, tokenizer: Any) -> ModelInMemory | None:
        """Take a ``PreTrainedModel``, with its weights on one device; None for any other object.

        Raises:
            ModelError: Its weights are on several devices or processes, or nowhere; or kvframe cannot serve it.
        """
        if not isinstance(model, PreTrainedModel):
            return None
        name, config = type(model).__name__, config_of(model)
        device, dtype = place_of(model)
        meta_model = build_like(model, config)
        eos, generation = generation_eos_token_ids(model), getattr(model, "generation_config", None)
        entries = {} if generation is None else generation.to_dict()
        description = _describe(
            config, name, meta_model, partial(build_like, model, config), eos, sampling_of(entries, eos)
        )
        warn_of_others(entries, name)
        loaded_model: TransformersModel
        if config.is_encoder_decoder:
            loaded_model = EncoderDecoderModel(model, tokenizer, description, partial(build_like, model, config))
        else:
            loaded_model = _one_sequence_model(model, tokenizer, description)
        loaded_model.packs_weights = SETTINGS[PACK_WEIGHTS]
        return ModelInMemory(model=loaded_model, device=device, dtype=dtype)


@attrs.frozen
class _Checkpoint:
    """A checkpoint as its config describes it.

    Attributes:
        description: Its layers.
        make: The class of its model.
        idle_parts: The parts of its model that text does not need.
    """

    description: ModelDescription
    make: Any
    idle_parts: Sequence[str]

    @classmethod
    def read(cls, path: Path) -> _Checkpoint:
        """Read a folder or a config file; raise ``ModelError`` if it holds no model that kvframe can describe."""
        config = _read_config(path)
        folder = path if path.is_dir() else path.parent
        name = _name_of(folder) if path.is_dir() or path.name == "config.json" else path.name
        build = partial(build_without_weights, copy.deepcopy(config), name)  # a probed model's config is changed
        meta_model = build_without_weights(config, name)
        with quiet():
            idle = idle_parts(meta_model, name) if generates(config) else ()
        remove_parts(meta_model, idle)
        eos = eos_token_ids(folder, config)
        sampling = sampling_of(read_generation_config(folder), eos)
        return cls(_describe(config, name, meta_model, build, eos, sampling), type(meta_model), idle)

    def load(
        self, path: Path, config: Any, device: str, dtype: torch.dtype, options: Mapping[str, Any]
    ) -> PreTrainedModel:
        """Load the weights of the parts that text needs; raise ``ModelError`` as ``load_weights`` does."""
        if not self.idle_parts:
            return load_weights(path, config, device, dtype, **options)
        make = class_without(self.make, self.idle_parts)
        model = load_weights(path, config, device, dtype, make, **options)
        model.__class__ = self.make
        return model


def _read_config(path: Path) -> Any:
    config = read_config(path)
    without_timm(config)
    return config


def _name_of(folder: Path) -> str:
    """Return a checkpoint's name: its folder's, or in the cache of huggingface_hub the repository's."""
    folder = folder.resolve()
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.parent.parent.name.rpartition("--")[2] if is_snapshot else folder.name


def _one_sequence_model(
    model: PreTrainedModel, tokenizer: Any, description: ModelDescription, folder: Path | None = None
) -> TransformersModel:
    """Return what runs a model without an encoder beside its decoder."""
    if not description.generates and not description.layers:
        return EncoderAlone(model, tokenizer, description, folder)
    return TransformersModel(model, tokenizer, description, folder, _first_position(model, description))


def _first_position(model: PreTrainedModel, description: ModelDescription) -> int:
    """Return the model's number for the position of a prompt's first token."""
    return find_first_position(model) if num_unused_positions(model) or not description.generates else 0


def _is_bounded(layer: LayerDescription) -> bool:
    """Return whether a layer needs a bounded number of tokens, however long a request is."""
    return not layer.query or bool({"window", "chunk"} & layer.options.keys())


def _layers_of(
    model: PreTrainedModel, name: str, length: int, generating: bool, build: Callable[[], PreTrainedModel]
) -> tuple[LayerDescription, ...]:
    """Return a model's layers; none for an encoder that keeps nothing and attends as no layer describes."""
    try:
        return discover_layers(model, name, length, generates=generating)
    except OwnMaskError:
        if not generating or length > _LONGEST_OWN_MASK:
            raise
        values = KnownValues()
        with values:
            second_model = build()
        return discover_layers(second_model, name, length, values=values)
    except ModelError as error:
        if generating:
            raise
        why = str(error).partition("; only a plugin")[0]
        _warn_once(f"{why}; so its own code computes the texts of a step one after the other, on no backend")
        return ()


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def _describe(
    config: Any,
    name: str,
    model: PreTrainedModel,
    build: Callable[[], PreTrainedModel],
    eos: frozenset[int],
    sampling: Mapping[str, Any],
) -> ModelDescription:
    """Return the description of a model on the meta device, whose implementations are changed.

    Args:
        config: Its config.
        name: Its name for people.
        model: The model.
        build: Builds it again.
        eos: The ids that end a request.
        sampling: How its tokens are chosen.
    """
    generating, length = generates(config), max_model_len(config)
    with quiet():
        if length is not None and not config.is_encoder_decoder:
            length -= num_unused_positions(model)
        layers = _layers_of(model, name, length or DEFAULT_POSITIONS, generating, build)
        num_heads, head_layers = describe_heads(model, name) if generating else (0, ())
    if config.is_encoder_decoder and not any(layer.kind == "cross_attention" for layer in layers):
        raise ModelError(
            f"the decoder of {name} ({type(model).__name__}) has no cross-attention that reads the last hidden states "
            "of its encoder; only a model adapter of its own can serve it"
        )
    if length is None and all(_is_bounded(layer) for layer in layers):
        length = UNLIMITED
    if length is None and any(SLOPES in layer.query for layer in layers):
        length = DEFAULT_POSITIONS
    encoder_len = max_encoder_len(model) if config.is_encoder_decoder else None
    if length is None:
        raise ModelError(f"the config of {name} does not say how many positions the model has")
    return ModelDescription(
        name=name,
        layers=layers,
        max_model_len=length,
        vocab_size=text_attribute(config, "vocab_size"),
        eos_token_ids=eos,
        sampling=sampling if generating else {},
        max_input_lens={} if encoder_len is None else {ENCODER: encoder_len},
        bidirectional_prompts=generating and sees_whole_prompts(model, layers),
        generates=generating,
        num_prediction_heads=num_heads,
        prediction_layers=head_layers,
    )

"""Reads a checkpoint folder: config, generation config, weights, tokenizer; raises ``ModelError`` on any failure."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from huggingface_hub import constants
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging

from kvframe.contract import ModelError, shown
from kvframe_transformers.encoders import BodyLoader, generates, is_text_encoder, text_attribute
from kvframe_transformers.soft_caps import attention_options

# transformers' type hints are incomplete.
_CausalLM: Any = AutoModelForCausalLM
_MultimodalLM: Any = AutoModelForMultimodalLM
_ENCODER_DECODERS: tuple[Any, ...] = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForMultimodalLM)
_logging: Any = logging

_DEFAULT_POSITIONS = 512
"""The limit for a model without a last position, if its config names none: the length that T5 was trained on."""

DEFAULT_ENCODER_LEN = 4096
"""The limit for an encoder without a last position: those of pictures of up to 64 by 64 patches, or 80 s of speech."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


_MAX_PARTS = 10_000
"""The most layers, experts or labels of a model: transformers creates a module or a string for each."""

_COUNTS_PARTS = re.compile(r"(.*_)?(layers?|experts|labels|codebooks|blocks|stages)")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers quiet and offline inside the block.

    It prints no notes, and progress bars only on a terminal. It opens no connection to the Hub: anything that a
    checkpoint names, such as a kernel, is used if it is on the machine already, and is never downloaded.
    """
    verbosity, bars = _logging.get_verbosity(), _logging.is_progress_bar_enabled()
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    _logging.set_verbosity_error()
    if not sys.stderr.isatty():
        _logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        _logging.set_verbosity(verbosity)
        if bars:
            _logging.enable_progress_bar()


def read_config_file(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a model's config, from its folder or the file itself; None if it cannot be read."""
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # ValueError: not JSON, or not text
        return None
    return content if isinstance(content, dict) else None


def read_config(path: Path) -> Any:
    """Return the transformers config of a folder or a config file; raise ``ModelError`` if there is none.

    Implementations of attention or experts in it are removed: a checkpoint may not choose the code that runs.
    """
    content = read_config_file(path)
    if content is None:
        raise ModelError(f"{path} holds no model config; a Hugging Face model is a folder with a config.json")
    if "model_type" not in content:
        raise ModelError(f"the config of {path} names no model_type, so no architecture can be built from it")
    _check_parts(content, str(path))
    if not _is_known(content["model_type"]):
        raise ModelError(
            f"the config of {path} names the architecture {shown(content['model_type'], 60)}, which transformers "
            f"{transformers.__version__} does not have; a later version may have it"
        )
    try:
        with quiet():
            config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            # These are properties whose setters also change nested configs.
            config._attn_implementation = None
            config._experts_implementation = None
            if is_text_encoder(config):
                config.is_encoder_decoder = False
            return config
    except Exception as error:  # transformers raises many types for an invalid config
        raise ModelError(f"the config of {path} cannot be read: {one_sentence(error)}") from error


def _is_known(model_type: object) -> bool:
    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def _check_parts(content: Any, name: str) -> None:
    """Raise for a config with more layers, experts or labels than can be built."""
    if isinstance(content, list):
        for part in content:
            _check_parts(part, name)
    if not isinstance(content, dict):
        return
    for key, value in content.items():
        if isinstance(value, int | float) and value > _MAX_PARTS and _COUNTS_PARTS.fullmatch(str(key)):
            raise ModelError(f"the config of {name} has {key} = {value:.6g}; a model has at most {_MAX_PARTS}")
        _check_parts(value, name)


def auto_model(config: Any) -> Any:
    """Return the class that creates models for a config: one of transformers' auto classes, or ``BodyLoader``."""
    if config.is_encoder_decoder:
        return next(iter(_knowing(config, _ENCODER_DECODERS)), _ENCODER_DECODERS[0])
    if not generates(config):
        return BodyLoader(config)
    return next(iter(_knowing(config, (_CausalLM, _MultimodalLM))), None) or _NamedClass.of(config) or _CausalLM


def _knowing(config: Any, autos: Sequence[Any]) -> list[Any]:
    """Return the auto classes that know a config, those first whose class the config names.

    The classes of one config have other parts, or other names of weights.
    """
    auto_classes = [auto for auto in autos if type(config) in auto._model_mapping]
    is_named = {
        auto: auto._model_mapping[type(config)].__name__ in (config.architectures or ()) for auto in auto_classes
    }
    return sorted(auto_classes, key=lambda auto: not is_named[auto])


@attrs.frozen
class _NamedClass:
    """Creates models of a class that a config names and no auto class knows, such as the text part of Llama 3.2 Vision.

    Attributes:
        model_class: The class; one of transformers' own.
    """

    model_class: Any

    @classmethod
    def of(cls, config: Any) -> _NamedClass | None:
        """Return it for the first name of a class that generates text from such a config; None if there is none."""
        for name in config.architectures or ():
            model_class: Any = getattr(transformers, str(name), None)
            is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
            if is_model and model_class.can_generate():
                return cls(model_class) if model_class.config_class is type(config) else None
        return None

    def from_config(self, config: Any, *, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
        """Return the model with random weights."""
        model: PreTrainedModel = self.model_class._from_config(config, **options)
        return model

    def from_pretrained(self, path: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
        """Return the model with a folder's weights, as transformers' auto classes do."""
        return self.model_class.from_pretrained(path, **options)


def build_without_weights(config: Any, name: str) -> PreTrainedModel:
    """Return the model of ``config`` on the meta device; raise ``ModelError`` if it is not a text model."""
    auto = auto_model(config)
    try:
        with quiet(), torch.device("meta"):
            model: PreTrainedModel = auto.from_config(config, trust_remote_code=False).eval()
    except Exception as error:  # a wrong number in a config may raise any error in a module's __init__
        if auto is _CausalLM and type(config) not in _CausalLM._model_mapping:
            raise ModelError(
                f"{name} has the architecture {config.model_type!r}, for which transformers has no text model: kvframe "
                "runs models that generate text or embed it"
            ) from error
        raise ModelError(f"no text model can be built from the config of {name}: {one_sentence(error)}") from error
    return model


def load_weights(
    path: Path, config: Any, device: str, dtype: torch.dtype, make: Any = None, **options: Any
) -> PreTrainedModel:
    """Return the model of a folder with its weights; raise ``ModelError`` if any are missing or do not fit.

    Args:
        path: The folder.
        config: Its config.
        device: The device of the model.
        dtype: The dtype of the weights.
        make: What creates the model; ``auto_model(config)`` unless given.
        options: Further options of ``from_pretrained``.
    """
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{path} holds an adapter of another model's weights (adapter_config.json); merge it into its model, and "
            "give the folder of the merged model"
        )
    try:
        with quiet():
            model, report = (make or auto_model(config)).from_pretrained(
                str(path),
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported, and raised below with the weight's name
                output_loading_info=True,
                **attention_options(config),
                **options,
            )
    except Exception as error:  # a corrupt file raises an error of safetensors, pickle, json, torch or transformers
        raise ModelError(f"the weights of {path} cannot be loaded: {one_sentence(error)}") from error
    for problem, keys in (("has no", report["missing_keys"]), ("has another shape for", report["mismatched_keys"])):
        if keys:
            first = sorted(key if isinstance(key, str) else key[0] for key in keys)[0]
            raise ModelError(
                f"the checkpoint {path} {problem} {first!r} ({len(keys)} such weights): its config asks for it, and "
                "running without it would use random numbers"
            )
    loaded_model: PreTrainedModel = model.to(device).eval()
    return loaded_model


def load_tokenizer(path: Path) -> Any:
    """Return the folder's tokenizer; None if it has none; raise ``ModelError`` if it cannot be read."""
    if not any((path / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            return tokenizer if _has_vocabulary(path, tokenizer) else None
    except Exception as error:  # as for the weights
        raise ModelError(f"the tokenizer of {path} cannot be read: {one_sentence(error)}") from error


def _has_vocabulary(path: Path, tokenizer: Any) -> bool:
    """Return whether a folder has the file of its tokenizer's vocabulary, or the tokenizer needs none.

    From a folder with only the settings, transformers makes a tokenizer that knows only special tokens: it turns every
    text into no tokens, or into unknown ones.
    """
    names = set(tokenizer.vocab_files_names.values())
    return not names or any(path.glob("tokenizer.*")) or any((path / name).is_file() for name in names)


def max_model_len(config: Any) -> int | None:
    """Return the most tokens of a request that the model was made for; None if its config does not say."""
    text = config.get_text_config(decoder=True)
    length = _positions(text, "max_target_positions", "max_decoder_position_embeddings", "max_text_positions")
    if length is None:
        return None
    # With long-rope factors transformers rotates *every* position of a batch by its longest request's factors, so a
    # request's tokens would depend on its neighbours beyond this length.
    return min([length, *_long_rope_limits(getattr(text, "rope_parameters", None) or {})])


def max_encoder_len(model: Any) -> int:
    """Return the most tokens that an encoder makes of its input, by the configs of its model; a default if none says.

    Args:
        model: The encoder-decoder model.
    """
    config = model.config
    # A model of two nested configs, such as T5Gemma, has one for the encoder.
    nested_configs = (getattr(config, name, None) for name in ("encoder", "encoder_config"))
    encoder_config = next((nested_config for nested_config in nested_configs if nested_config is not None), config)
    lengths = (
        _positions(nested_config, "max_source_positions", "max_encoder_position_embeddings", "max_speech_positions")
        for nested_config in (
            encoder_config,
            config.get_text_config(encoder=True),
            getattr(model.get_encoder(), "config", config),
        )
    )
    return next((length for length in lengths if length is not None), DEFAULT_ENCODER_LEN)


def _positions(config: Any, *names: str) -> int | None:
    """Return the number of positions of one side of a model, by the config's names for that side or for both."""
    for attribute in (*names, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        length = getattr(config, attribute, None)
        if isinstance(length, int) and length > 0:
            return length
    return _DEFAULT_POSITIONS if hasattr(config, "relative_attention_max_distance") else None


def _long_rope_limits(parameters: dict[str, Any]) -> list[int]:
    limits = []
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings"):
            limits.append(int(rope["original_max_position_embeddings"]))
    return limits


def eos_token_ids(path: Path, config: Any) -> frozenset[int]:
    """Return the ids that end a request.

    The ids of the generation config, or none if it has null there; if it has no entry, those of the config.

    Raises:
        ModelError: The generation config is invalid, or the entry does not hold token ids.
    """
    file = path / "generation_config.json"
    ids = text_attribute(config, "eos_token_id")
    if file.is_file():
        try:
            ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id", ids)
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ModelError(f"{file} is no generation config: {one_sentence(error)}") from error
    return checked_eos_token_ids(ids, str(path))


def checked_eos_token_ids(ids: Any, name: str) -> frozenset[int]:
    """Return the ids of an ``eos_token_id``, which may be one, several or None; raise ``ModelError`` for others.

    Args:
        ids: The entry.
        name: The model's name or path for errors.
    """
    token_ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in token_ids):
        raise ModelError(f"the eos_token_id of {name} must be a token id or a list of them, not {shown(ids, 60)}")
    return frozenset(token_ids)


def one_sentence(error: BaseException) -> str:
    """Return an error's type and the first line of its message, and the second line if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {first.rstrip('.')}"

"""Reads how a checkpoint's ``generation_config.json`` wants tokens to be chosen, as ``generate()`` chooses them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvframe_transformers.sentence_transformers import read_json

_log = logging.getLogger("kvframe")

_WARPERS: Mapping[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""What draws a token, and what ``generate()`` takes if a config that samples does not name it."""

_PROCESSORS = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_new_tokens",
    "max_new_tokens",
)
"""Entries that mean the same as the parameters with their names, whether a token is drawn or not."""

_OTHERS: Mapping[str, tuple[Any, ...]] = {
    "constraints": (),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "renormalize_logits": (False,),
    "sequence_bias": (),
    "token_healing": (False,),
    "top_h": (1.0,),
    "watermarking_config": (),
}
"""Entries that change tokens and are not served, with the values that change nothing, beside null."""


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the generation config of a checkpoint's folder; empty if it has none.

    Raises:
        ModelError: The file is no JSON object.
    """
    file = folder / "generation_config.json"
    return dict(read_json(file, dict)) if file.is_file() else {}


def sampling_of(config: Mapping[str, Any], eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Return the sampling parameters that a generation config asks for, by the names of ``SamplingParams``.

    Args:
        config: The generation config.
        eos_token_ids: The ids that end a request: no list of bad words bans them.
    """
    processors = {name: config[name] for name in _PROCESSORS if config.get(name) is not None}
    words = config.get("bad_words_ids")
    if isinstance(words, list):
        words = [word for word in words if not (isinstance(word, list) and len(word) == 1 and word[0] in eos_token_ids)]
    if words:
        processors["bad_words_ids"] = words
    if not config.get("do_sample"):
        return processors
    for name, usual in _WARPERS.items():
        value = config.get(name)
        processors[name] = usual if value is None else value
    # Some checkpoints write -1 for all tokens.
    if processors["top_k"] == -1:
        processors["top_k"] = 0
    return processors


def warn_of_others(config: Mapping[str, Any], name: str) -> None:
    """Log which entries of a generation config change tokens and are not served.

    Args:
        config: The generation config.
        name: The model's name.
    """
    other_keys = [
        f"{key} = {value!r:.60}"
        for key, neutral in _OTHERS.items()
        if (value := config.get(key)) is not None and value not in neutral
    ]
    if other_keys:
        _log.warning("%s: its generation config has entries that are not served: %s", name, ", ".join(other_keys))

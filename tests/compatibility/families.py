"""Compares what every tiny family gives through kvframe with what transformers itself gives, in this process.

``python -m tests.compatibility.families`` writes one line of JSON for each family, ``["llama", "equal"]``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvframe_transformers.checkpoint import one_sentence
from kvframe_transformers.testing import (
    ENCODER_DECODER_FAMILIES,
    ENCODER_FAMILIES,
    FAMILIES,
    MORE_ENCODER_DECODER_FAMILIES,
    MORE_FAMILIES,
    MORE_STATE_FAMILIES,
    STATE_FAMILIES,
)

from kvframe import SamplingParams
from tests.models import encoder_decoder
from tests.models.headed import HEADED
from tests.models.serving import PROMPTS, TinyModel, served
from tests.models.test_embedding_models import TEXTS, difference, embedded, embedder, plain_states

EQUAL = "equal"
_NUM_NEW_TOKENS = 8
_SETTINGS: tuple[dict[str, int], ...] = ({}, {"block_size": 5, "max_num_batched_tokens": 24, "max_num_seqs": 4})
"""Options of engines: the usual ones, and ones by which prompts are computed in parts."""


def _differs_as_decoder(family: str, folder: Path) -> str:
    model = TinyModel.save(folder, family)
    expected = [model.reference(prompt) for prompt in PROMPTS]
    for options in _SETTINGS:
        with model.engine(self_check=True, **options) as engine:
            if served(engine) != expected:
                return f"other tokens than generate() with {options or 'the usual options'}"
    return ""


def _differs_as_encoder(family: str, folder: Path) -> str:
    model = TinyModel.save(folder, family)
    expected = [plain_states(model, text).mean(0) for text in TEXTS]
    with embedder(model, pooling="mean", self_check=True) as made:
        worst = difference(expected, embedded(made))
    return "" if worst < 1e-5 else f"other hidden states (relative difference {worst:.1e})"


def _differs_as_encoder_decoder(family: str, folder: Path) -> str:
    model, prompts = TinyModel.save(folder, family), encoder_decoder.prompts(family)
    expected = [encoder_decoder.generated(model, family, prompt, _NUM_NEW_TOKENS) for prompt in prompts]
    params = SamplingParams(max_new_tokens=_NUM_NEW_TOKENS)
    for options in _SETTINGS:
        with model.engine(self_check=True, **options) as engine:
            if [output.token_ids for output in engine.generate(prompts, params)] != expected:
                return f"other tokens than generate() with {options or 'the usual options'}"
    return ""


_KINDS: Mapping[Callable[[str, Path], str], Sequence[str]] = {
    _differs_as_decoder: (
        *FAMILIES,
        *MORE_FAMILIES,
        *(family for family in HEADED if family not in MORE_FAMILIES),
        *STATE_FAMILIES,
        *MORE_STATE_FAMILIES,
    ),
    _differs_as_encoder: ENCODER_FAMILIES,
    _differs_as_encoder_decoder: (*ENCODER_DECODER_FAMILIES, *MORE_ENCODER_DECODER_FAMILIES),
}
ALL_FAMILIES = tuple(family for families in _KINDS.values() for family in families)
"""Every family of ``kvframe_transformers.testing``."""


def verdict_of(family: str) -> str:
    """Return ``equal``, or in one line what differs or why the family cannot be served."""
    differs = next(kind for kind, families in _KINDS.items() if family in families)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return differs(family, Path(folder) / family) or EQUAL
        except Exception as error:  # a release may break anything
            return one_sentence(error)


def main() -> None:
    """Write the verdict of each family, or of those that are named."""
    warnings.simplefilter("ignore")
    for family in sys.argv[1:] or ALL_FAMILIES:
        print(json.dumps([family, verdict_of(family)]), flush=True)


if __name__ == "__main__":
    main()

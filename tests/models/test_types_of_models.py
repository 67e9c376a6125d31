"""Types of models whose way in was once refused serve what transformers generates, from a checkpoint."""

from __future__ import annotations

import pytest

from tests.covering import keep
from tests.models.census.compare import Verdict, compare

# Their positions: a learned table, a table of sines, a first position after the padding, an inner model's argument.
POSITIONS = [
    ("decoders", "bart"),
    ("decoders", "roberta"),
    ("decoders", "moss_transcribe_diarize"),
    ("text with images", "kosmos-2.5"),
    ("encoder-decoders", "m2m_100"),
    ("encoder-decoders", "seamless_m4t"),
    ("speech", "speech_to_text"),
]
STATES = [("decoders", "lfm3"), ("decoders", "minimax")]
ENCODERS = [("speech", "moonshine"), ("speech", "canary"), ("speech", "cohere_asr")]


@pytest.mark.parametrize(
    ("group", "family"),
    keep(POSITIONS + STATES + ENCODERS, "bart", "roberta", "m2m_100", "lfm3", "minimax", "moonshine"),
)
def test_its_results_are_those_of_transformers(group: str, family: str) -> None:
    assert Verdict("equal") == compare(group, family)

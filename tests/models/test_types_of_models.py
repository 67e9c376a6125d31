"""Types of models whose way in was once refused serve what transformers generates, from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import AutoConfig, VisionEncoderDecoderConfig

from tests.covering import keep
from tests.models.census import shrink
from tests.models.census.compare import GROUPS, Verdict, compare

# Their positions: a learned table, a table of sines, sines, one after the padding, an inner model's argument.
POSITIONS = [
    ("decoders", "bart"),
    ("decoders", "roberta"),
    ("decoders", "moss_transcribe_diarize"),
    ("text with images", "kosmos-2.5"),
    ("encoder-decoders", "m2m_100"),
    ("encoder-decoders", "pegasus_x"),
    ("encoder-decoders", "seamless_m4t"),
    ("speech", "speech_to_text"),
]
# The last three keep their states in attributes of modules, and in an argument and the result of a module.
STATES = [
    ("decoders", "lfm3"),
    ("decoders", "minimax"),
    ("decoders", "recurrent_gemma"),
    ("decoders", "rwkv"),
    ("decoders", "xlstm"),
]
# Their decoders read more of the encoder's output than its states.
ENCODED = [("speech", "moonshine"), ("speech", "canary"), ("speech", "cohere_asr")]
# Models of two models, whose configs say not how long an encoder's output may be.
PAIRS = [
    ("text with images", "vision-encoder-decoder"),
    ("text with images", "florence2"),
    ("encoder-decoders", "encoder-decoder"),
    ("speech", "speech-encoder-decoder"),
    ("speech", "speecht5"),
]
# Modules that attend several times in a forward.
CALLS = [("decoders", "diffllama"), ("decoders", "hrm_text")]
# Their masks depend on pictures, and a text has none.
MASKS = [("decoders", "gemma4_unified"), ("text with images", "git")]
# Their experts look for the tokens that chose them.
EXPERTS = [
    ("decoders", "dbrx"),
    ("decoders", "longcat_flash"),
    ("text with images", "kimi_k25"),
    ("encoder-decoders", "switch_transformers"),
    ("encoder-decoders", "nllb-moe"),
    ("decoders", "jetmoe"),
    ("decoders", "xmod"),
]
# A layer that runs several times, and the encoders of encoder-decoder models.
ENCODERS = [("encoders", "albert"), ("encoders", "t5"), ("encoders", "umt5")]

# The text part of a model, which no auto class knows, and models whose configs several auto classes know.
NAMED = [("decoders", "mllama"), ("text with images", "emu3"), ("speech", "seamless_m4t")]
# They compute attention themselves, outside of transformers' interface; MPNet's has a bias by distance.
DIRECT = [
    ("encoders", "mpnet"),
    ("encoders", "squeezebert"),
    ("encoders", "tapas"),
    ("encoders", "xlm"),
    ("decoders", "gptj"),
    ("decoders", "codegen"),
    ("decoders", "gpt_neox_japanese"),
    ("decoders", "gpt_neo"),
    ("decoders", "openai-gpt"),
    ("decoders", "megatron-bert"),
    ("decoders", "rembert"),
    ("decoders", "bloom"),
    ("decoders", "falcon"),
    ("decoders", "mpt"),
    ("decoders", "xglm"),
    ("decoders", "trocr"),
    ("encoder-decoders", "mvp"),
    ("encoder-decoders", "led"),
]


@pytest.mark.parametrize(
    ("group", "family"),
    keep(
        POSITIONS + STATES + ENCODED + PAIRS + CALLS + MASKS + EXPERTS + ENCODERS + NAMED + DIRECT,
        "bart",
        "roberta",
        "m2m_100",
        "pegasus_x",
        "lfm3",
        "minimax",
        "recurrent_gemma",
        "moonshine",
        "speech-encoder-decoder",
        "diffllama",
        "gemma4_unified",
        "dbrx",
        "jetmoe",
        "switch_transformers",
        "albert",
        "t5",
        "seamless_m4t",
        "codegen",
        "gpt_neo",
    ),
)
def test_its_results_are_those_of_transformers(group: str, family: str) -> None:
    if family not in GROUPS[group].types:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    assert "equal" == compare(group, family).word


TOWERS: dict[str, dict[str, Any]] = {
    "vit": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14},
    "donut-swin": {"image_size": [28, 28], "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]},
}


@pytest.mark.parametrize(("encoder", "decoder"), keep([("vit", "trocr"), ("donut-swin", "mbart")], "trocr"))
def test_pictures_of_trocr_and_donut_become_the_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch, encoder: str, decoder: str
) -> None:
    tower = AutoConfig.for_model(encoder, **TOWERS[encoder])
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(tower, shrink.tiny_config(decoder))
    monkeypatch.setattr("tests.models.census.compare.tiny_config", lambda _: config)
    assert Verdict("equal") == compare("text with images", "vision-encoder-decoder")


def test_a_decoder_that_counts_the_encoders_tokens_of_all_requests_is_refused() -> None:
    """Two requests begin in one step of the self-check, and Moonshine's decoder gives their inputs positions."""
    verdict = compare("speech", "moonshine_streaming")
    assert "refused" == verdict.word
    assert "gives other logits in a packed batch than alone" in verdict.why


def test_a_long_mask_that_a_module_makes_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local layers of GPT-Neo see windows, which only a run of all positions shows."""
    monkeypatch.setitem(shrink.SPECIAL, "gpt_neo", {**shrink.SPECIAL["gpt_neo"], "max_position_embeddings": 2049})
    verdict = compare("decoders", "gpt_neo")
    assert "refused" == verdict.word
    assert "changes its mask after transformers made it" in verdict.why


def test_a_bias_by_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shrink.SPECIAL, "falcon", {"alibi": True})
    assert "refused" == compare("decoders", "falcon").word

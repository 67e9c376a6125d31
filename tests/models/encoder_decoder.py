"""Inputs for encoders in tests, including recordings, and the tokens that transformers generates for them."""

from __future__ import annotations

import io
import math
import struct
import wave
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from transformers import WhisperFeatureExtractor

from kvframe import Prompt
from tests.models.serving import TinyModel, ids

START = 3
"""The token that the tiny decoders start with."""
_RATE = 16_000
_EXTRACTOR = WhisperFeatureExtractor(feature_size=80, chunk_length=1)


def recording(pitch: float, seconds: float = 1.0) -> bytes:
    """Return a WAV file: a tone that rises from ``pitch`` and throbs."""
    times = [step / _RATE for step in range(int(seconds * _RATE))]
    samples = [
        int(20_000 * math.sin(math.tau * pitch * (1 + time) * time) * (0.6 + 0.4 * math.cos(9 * math.tau * time)))
        for time in times
    ]
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(_RATE)
        wav.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return file.getvalue()


def log_mel(wav: bytes) -> torch.Tensor:
    """Return Whisper's features of a WAV file of up to a second: ``[1, 80, 100]``."""
    with wave.open(io.BytesIO(wav), "rb") as file:
        assert (1, 2, _RATE) == (file.getnchannels(), file.getsampwidth(), file.getframerate())
        data = file.readframes(file.getnframes())
    samples = torch.tensor(struct.unpack(f"<{len(data) // 2}h", data)) / 2**15
    features: torch.Tensor = _EXTRACTOR(samples.numpy(), sampling_rate=_RATE, return_tensors="pt").input_features
    return features


def encoder_inputs(family: str) -> list[Any]:
    """Return four different inputs for a family's encoder; token ids are shorter and longer than a block of 16."""
    if family == "whisper":
        return [log_mel(recording(pitch, seconds)) for pitch, seconds in ((220, 1), (330, 0.7), (523, 1), (900, 0.3))]
    return [ids(start, count) for start, count in ((1, 1), (2, 6), (4, 17), (5, 41))]


def prompts(family: str) -> list[Prompt]:
    """Return eight prompts: with and without decoder tokens, some of them shared, and with some equal inputs."""
    first, second, third, fourth = encoder_inputs(family)
    shared = [START, *ids(9, 19)]
    return [
        Prompt(encoder=first),
        Prompt(encoder=second, decoder=[START, *ids(10, 2)]),
        Prompt(encoder=third, decoder=shared),
        Prompt(encoder=third, decoder=[*shared, *ids(11, 5)]),
        Prompt(encoder=fourth, decoder=[*shared, *ids(11, 5)]),
        Prompt(encoder=fourth),
        Prompt(encoder=third, decoder=[*shared, *ids(12, 30)]),
        Prompt(encoder=second, decoder=[START, *ids(13, 40)]),
    ]


def decoder_of(prompt: Prompt) -> list[int]:
    """Return the tokens that a prompt's decoder starts with."""
    return [START] if prompt.decoder is None else [int(token) for token in prompt.decoder]


def as_batch(family: str, encoder: Any) -> torch.Tensor:
    """Return an encoder's input as a batch of one."""
    return encoder if family == "whisper" else torch.tensor([encoder])


def generated(model: TinyModel, family: str, prompt: Prompt, num_new_tokens: int) -> tuple[int, ...]:
    """Return the tokens that transformers generates for a prompt; the model must not be attached."""
    loaded: Any = model.loaded
    batch = as_batch(family, prompt.encoder)
    with torch.inference_mode():
        tokens = loaded.model.generate(
            batch.to(loaded.model.dtype) if batch.is_floating_point() else batch,
            decoder_input_ids=torch.tensor([decoder_of(prompt)]),
            max_new_tokens=num_new_tokens,
            do_sample=False,
        )
    return tuple(tokens[0, -num_new_tokens:].tolist())


def plain_logits(model: TinyModel, family: str, encoder: Any, decoder: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits ``[num_tokens, vocab_size]`` of a decoder's tokens; the model must be detached."""
    loaded: Any = model.loaded
    with torch.inference_mode():
        output = loaded.model(
            **{loaded.model.main_input_name: as_batch(family, encoder)}, decoder_input_ids=torch.tensor([[*decoder]])
        )
    logits: torch.Tensor = output.logits[0]
    return logits


@attrs.frozen
class EncoderCalls:
    """Counts the inputs that a model's encoder computes."""

    sizes: list[int] = attrs.field(factory=list)

    def count(self, model: TinyModel) -> Any:
        """Start counting; return a function that stops it."""
        loaded: Any = model.loaded
        encoder = loaded.model.get_encoder()

        def note(module: Any, args: Any, kwargs: Any) -> None:
            self.sizes.append(len(kwargs[loaded.model.main_input_name]))

        return encoder.register_forward_pre_hook(note, with_kwargs=True)

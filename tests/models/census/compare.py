"""Compares one tiny random model: what kvframe computes from its checkpoint, and what transformers computes."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import torch
import transformers
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.encoder_decoder import input_name_of
from kvframe_transformers.testing import spread_weights
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel

from kvframe import Embedder, Engine, Prompt, RequestOutput, SamplingParams, Stack
from kvframe.contract import KVFrameError, shown
from tests.models.census.shrink import VOCAB, tiny_config

NUM_NEW = 8
_MAX_WEIGHTS = 110_000_000
_STACK = Stack.from_mapping({"cache": {"memory": "8MiB"}, "limits": {"max_num_batched_tokens": 64}})
_CHUNKS = Stack.from_mapping(
    {"cache": {"memory": "8MiB", "block_size": 5}, "limits": {"max_num_batched_tokens": 22, "max_num_seqs": 2}}
)
"""A step has a part of the longest prompt, and blocks end within prompts."""
_TOGETHER = Stack.from_mapping(
    {"cache": {"memory": "8MiB", "block_size": 5}, "limits": {"max_num_batched_tokens": 512, "max_num_seqs": 2}}
)
"""A step has the inputs of several requests."""
_TOLERANCE = 1e-3


def _types(*names: str) -> tuple[str, ...]:
    names_of_types: set[str] = set()
    for name in names:
        names_of_types |= set(getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES"))
    return tuple(sorted(names_of_types))


@attrs.frozen
class Group:
    """One of transformers' mappings: the auto class that makes its models, and its types."""

    auto: str
    types: tuple[str, ...]


def _encoders() -> tuple[str, ...]:
    """Return the types with a masked language model or a text encoder, without whole encoder-decoders such as BART."""
    encoder_decoders = set(_types("MASKED_LM")) & set(_types("SEQ_TO_SEQ_CAUSAL_LM"))
    return tuple(name for name in _types("MASKED_LM", "TEXT_ENCODING") if name not in encoder_decoders)


GROUPS: Mapping[str, Group] = {
    "decoders": Group("AutoModelForCausalLM", _types("CAUSAL_LM")),
    "text with images": Group("AutoModelForImageTextToText", _types("IMAGE_TEXT_TO_TEXT")),
    "encoder-decoders": Group("AutoModelForSeq2SeqLM", _types("SEQ_TO_SEQ_CAUSAL_LM")),
    "speech": Group("AutoModelForSpeechSeq2Seq", _types("SPEECH_SEQ_2_SEQ")),
    "encoders": Group("AutoModel", _encoders()),
}


@attrs.frozen
class Verdict:
    """What became of a type.

    Attributes:
        word: ``equal``, ``refused``, ``wrong``, ``fails``, or ``not tried`` if transformers itself gives nothing.
        why: One sentence; empty for an equal model.
    """

    word: str
    why: str = ""


def compare(group: str, model_type: str, seconds: int = 60) -> Verdict:
    """Return the verdict on one type; a run that takes longer than ``seconds`` fails."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _limit(seconds):
                return _compare(group, model_type, Path(folder) / model_type)
        except TimeoutError:
            return Verdict("fails", f"took more than {seconds} s")


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _compare(group: str, model_type: str, folder: Path) -> Verdict:
    try:
        with quiet(), _standing_in_for_timm():
            model = _make(group, model_type)
            if group != "encoders":
                _forget_settings(model)
            model.save_pretrained(folder)
            model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
        run = _Encoder(model) if group == "encoders" else _Decoder(model)
        with quiet():
            expected = run.theirs()
    except TimeoutError:
        raise
    except Exception as error:
        return Verdict("not tried", _short(error))
    try:
        with quiet():
            return run.verdict(folder, expected)
    except KVFrameError as error:
        return Verdict("refused", str(error).replace(str(folder.parent) + os.sep, ""))
    except TimeoutError:
        raise
    except Exception as error:
        if os.environ.get("CENSUS_TRACE"):
            traceback.print_exc()
        return Verdict("fails", _short(error))


@contextmanager
def _standing_in_for_timm() -> Iterator[None]:
    """Let transformers make and load models whose vision tower is of the library timm, without that tower."""

    def init(self: Any, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.timm_model = torch.nn.Identity()

    with patch.object(TimmWrapperModel, "__init__", init):
        yield


def _forget_settings(model: Any) -> None:
    """Give a model a generation config that generates greedily, without any end."""
    starts = (model.generation_config.decoder_start_token_id, getattr(model.config, "decoder_start_token_id", None), 3)
    start = next(token for token in starts if token is not None) if model.config.is_encoder_decoder else None
    model.generation_config = GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0, decoder_start_token_id=start
    )


_WITH_LOGITS = ("llama4",)
"""Types of encoders for which ``AutoModel`` makes a whole model of text and images."""


def _make(group: str, model_type: str) -> Any:
    config = tiny_config(model_type)
    for switch in ("is_decoder", "causal"):
        if group == "decoders" and hasattr(config, switch):
            setattr(config, switch, True)  # the heads of encoders are for that
    if group == "decoders" and model_type == "big_bird":
        config.attention_type = "original_full"  # BigBird is no decoder otherwise
    auto: Any = getattr(transformers, GROUPS[group].auto)
    if group == "encoders" and (config.is_encoder_decoder or model_type in _WITH_LOGITS):
        auto, config.is_encoder_decoder = transformers.AutoModelForTextEncoding, False
    with torch.device("meta"):
        size = sum(weight.numel() for weight in auto.from_config(config).parameters())
    if size > _MAX_WEIGHTS:
        raise ValueError(f"a model of {size:,} weights is not tiny")
    for factor in (8.0, 2.0, 1.0):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32).eval()
        spread_weights(model, factor)
        if group == "encoders" or model.config.is_encoder_decoder:
            return model
        with torch.inference_mode():
            if model(input_ids=torch.tensor([_ids(1, 20)])).logits.isfinite().all():
                return model
    raise ValueError("its logits are not finite")


def _ids(start: int, count: int) -> list[int]:
    # Ids with a special meaning are at the ends of the range.
    return [10 + (start * 31 + index * index * 7 + index * 13) % (VOCAB - 20) for index in range(count)]


_PROMPTS = [_ids(1, 3), _ids(2, 21), _ids(3, 10)]


class _Encoder:
    def __init__(self, model: Any) -> None:
        self._model = model

    def theirs(self) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [
                self._model(input_ids=torch.tensor([prompt])).last_hidden_state[0].mean(0).double()
                for prompt in _PROMPTS
            ]

    def verdict(self, folder: Path, expected: Any) -> Verdict:
        with Embedder.from_pretrained(folder, stack=_STACK, pooling="mean", normalize=False) as embedder:
            ours = [torch.tensor(output.embedding).double() for output in embedder.embed(_PROMPTS)]
            is_own = not embedder.choices
        worst = max(float((mine - theirs).norm() / theirs.norm()) for mine, theirs in zip(ours, expected, strict=True))
        if worst < _TOLERANCE and is_own:
            return Verdict("equal", "its own code computes the texts of a step one after the other, on no backend")
        return Verdict("equal") if worst < _TOLERANCE else Verdict("wrong", f"embeddings differ by {worst:.1e}")


@attrs.frozen
class _Generated:
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    """The difference between the two largest logits, relative to their spread."""
    logprobs: tuple[float, ...]
    """The log-probabilities of the tokens, because a tiny model may repeat one token, whatever it attends to."""
    spreads: tuple[float, ...]
    """The standard deviation of the logits."""


class _Decoder:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._start = model.generation_config.decoder_start_token_id
        self._inputs = [_inputs_of(model, prompt) for prompt in _PROMPTS]

    def theirs(self) -> list[_Generated]:
        generations = []
        for prompt, inputs in zip(_PROMPTS, self._inputs, strict=True):
            if not self._model.config.is_encoder_decoder:
                inputs = {
                    "input_ids": torch.tensor([prompt]),
                    "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64),
                }
            output = self._model.generate(**inputs, return_dict_in_generate=True, output_logits=True)
            logits = torch.stack(output.logits)[:, 0].double()
            top = logits.topk(2).values
            margins = (top[:, 0] - top[:, 1]) / logits.std(-1)
            tokens = output.sequences[0, -NUM_NEW:]
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            values = (tensor.tolist() for tensor in (tokens, margins, logprobs, logits.std(-1)))
            generations.append(_Generated(*map(tuple, values)))
        return generations

    def verdict(self, folder: Path, expected: Any) -> Verdict:
        params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=True)
        prompts: list[Any] = list(_PROMPTS)
        if self._model.config.is_encoder_decoder:
            prompts = [Prompt(encoder=next(iter(inputs.values()))[0], decoder=[self._start]) for inputs in self._inputs]
            if input_name_of(self._model) == "input_ids":
                prompts = [Prompt(encoder=prompt, decoder=[self._start]) for prompt in _PROMPTS]
        stack = _TOGETHER if self._model.config.is_encoder_decoder else _CHUNKS
        with Engine.from_pretrained(folder, stack=stack) as engine:
            outputs = engine.generate(prompts, params)
            again = engine.generate(prompts, params)  # the prompts' blocks are found
        for output, theirs in [*zip(outputs, expected, strict=True), *zip(again, expected, strict=True)]:
            if output.error:
                return Verdict("fails", output.error)
            for index, (mine, own) in enumerate(zip(output.token_ids, theirs.tokens, strict=True)):
                if mine != own and theirs.margins[index] < _TOLERANCE:
                    break  # a tie, which rounding decides
                difference = abs(output.logprobs[index] - theirs.logprobs[index]) / theirs.spreads[index]
                if mine != own or difference > _TOLERANCE:
                    if self._is_own(output):
                        return Verdict("equal", "equal to the model's own forward; its generate() gives other logits")
                    what = f"is {mine} instead of {own}" if mine != own else f"has other logits, by {difference:.1e}"
                    return Verdict("wrong", f"token {index} {what}")
        return Verdict("equal")

    def _is_own(self, output: RequestOutput) -> bool:
        """Return whether the tokens are the likeliest by one forward of all tokens, as likely as in the output."""
        if self._model.config.is_encoder_decoder:
            return False
        prompt, tokens = output.prompt_token_ids, output.token_ids
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1].double()
        logprobs = rows.log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        missing, difference = logprobs.max(-1).values - own, (own - torch.tensor(output.logprobs)).abs()
        return bool((torch.maximum(missing, difference) / rows.std(-1) < _TOLERANCE).all())


def _inputs_of(model: Any, prompt: list[int]) -> dict[str, torch.Tensor]:
    """Return the inputs of an encoder; features of a length that it takes."""
    if not model.config.is_encoder_decoder:
        return {}
    name = input_name_of(model)
    if name == "input_ids":
        return {name: torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
    generator = torch.Generator().manual_seed(len(prompt))
    failure: Exception = ValueError(f"it takes {name}")
    for shape in _shapes(model.config):
        features = torch.randn(1, *shape, generator=generator).abs()
        try:
            with torch.inference_mode():
                model.get_encoder()(**{name: features})
            return {name: features}
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            failure = error
    raise failure


def _shapes(config: Any) -> Iterator[tuple[int, ...]]:
    frames = 2 * getattr(config, "max_source_positions", 50)
    bins = next(
        (
            value
            for key in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
            if (value := getattr(config, key, None))
        ),
        80,
    )
    yield bins, frames
    yield frames, bins
    yield (16_000,)
    vision = getattr(config, "vision_config", None)
    yield 3, *2 * (getattr(vision, "image_size", 28),)
    yield 20, 2 + 3 * getattr(vision, "patch_size", 14) ** 2  # each patch has a row and a column


def _short(error: BaseException) -> str:
    return shown(f"{type(error).__name__}: {' '.join(str(error).split())}", 200).strip("'\"")

"""Sampling parameters: how a request's tokens are chosen and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import attrs

from kvframe.contract.errors import RequestError, shown

MAX_TOP_LOGPROBS = 20
"""The most tokens whose log-probabilities are reported at one place."""

MAX_BIAS = 100.0
"""The greatest amount of a bias on a token's logit."""

MAX_BIASED = 1024
"""The most tokens with a bias: each step reads all of them."""

MAX_PENALTY = 2.0
"""The greatest amount of a frequency penalty and of a presence penalty."""


def bad_params(message: str) -> RequestError:
    """Return the error for a wrong parameter."""
    return RequestError(message, code="bad_params")


def _as_int(value: Any) -> Any:
    # A wrong value is returned as it is: the validator names it in its error.
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _as_float(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
    except OverflowError:  # a whole number beyond all floats
        return value


def _as_strings(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _collected(tuple, value)


def _as_ids(value: Any) -> Any:
    ids = _collected(tuple, value)
    return _collected(frozenset, map(_as_int, ids)) if isinstance(ids, tuple) else ids


def _as_sequences(value: Any) -> Any:
    sequences = _collected(tuple, value)
    return tuple(_as_sequence(sequence) for sequence in sequences) if isinstance(sequences, tuple) else sequences


def _as_sequence(value: Any) -> Any:
    ids = value if isinstance(value, str) else _collected(tuple, value)
    return tuple(map(_as_int, ids)) if isinstance(ids, tuple) else ids


def _as_bias(value: Any) -> Any:
    return {_as_int(token): _as_float(bias) for token, bias in value.items()} if isinstance(value, Mapping) else value


def _as_processors(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _collected(collect: Any, value: Any) -> Any:
    try:
        return value if isinstance(value, bytes | bytearray) else collect(value)
    except TypeError:  # it has no items, or items without a hash
        return value


def _int_at_least(minimum: int) -> Any:
    def check(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise bad_params(f"{attribute.name} must be a whole number of at least {minimum}, not {shown(value)}")

    return check


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _check_temperature(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not _is_number(value) or value < 0:
        raise bad_params(f"temperature must be 0 (greedy) or a positive number, not {shown(value)}")


def _check_mass(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not _is_number(value) or not 0 < value <= 1:
        raise bad_params(f"{attribute.name} must be above 0 and at most 1, not {shown(value)}")


def _check_min_p(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        raise bad_params(f"min_p must be from 0 to 1, not {shown(value)}")


def _check_repetition_penalty(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not _is_number(value) or value <= 0:
        raise bad_params(f"repetition_penalty must be a positive number, 1 for none, not {shown(value)}")


def _check_penalty(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not _is_number(value) or not -MAX_PENALTY <= value <= MAX_PENALTY:
        raise bad_params(f"{attribute.name} must be from -{MAX_PENALTY:g} to {MAX_PENALTY:g}, not {shown(value)}")


def _check_bias(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise bad_params(f"logit_bias must be a mapping of token ids to numbers, not {shown(value)}")
    if len(value) > MAX_BIASED:
        raise bad_params(f"logit_bias has {len(value):,} tokens, and may have {MAX_BIASED:,}")
    for token, bias in value.items():
        if not _is_id(token):
            raise bad_params(f"logit_bias must be by token id, not by {shown(token)}")
        if not _is_number(bias) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise bad_params(f"logit_bias must hold numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}, not {shown(bias)}")


def _check_sequences(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(sequence, tuple) and sequence for sequence in value):
        raise bad_params(f"{attribute.name} must be a list of non-empty lists of token ids, not {shown(value)}")
    for token in (token for sequence in value for token in sequence):
        if not _is_id(token):
            raise bad_params(f"{attribute.name} must hold token ids, not {shown(token)}")


def _check_processors(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise bad_params(f"processors must be a mapping of names to options, not {shown(value)}")
    for name, options in value.items():
        if not isinstance(name, str) or not isinstance(options, Mapping):
            raise bad_params(f"processors must be options by name, not {shown(options)} by {shown(name)}")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_stop(instance: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    if not isinstance(value, tuple):
        raise bad_params(f"stop must be a string or a sequence of strings, not {shown(value)}")
    for text in value:
        if not isinstance(text, str) or not text:
            raise bad_params(f"stop must hold non-empty strings, not {shown(text)}")


def _check_ids(instance: object, attribute: attrs.Attribute[frozenset[int]], value: frozenset[int]) -> None:
    if not isinstance(value, frozenset):
        raise bad_params(f"{attribute.name} must be a set or a sequence of whole numbers, not {shown(value)}")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int):
            raise bad_params(f"{attribute.name} must hold whole numbers, not {shown(token)}")


def _check_flag(instance: object, attribute: attrs.Attribute[bool], value: bool) -> None:
    if not isinstance(value, bool):
        raise bad_params(f"{attribute.name} must be True or False, not {shown(value)}")


def _check_top_logprobs(instance: SamplingParams, attribute: attrs.Attribute[int], value: int) -> None:
    _int_at_least(0)(instance, attribute, value)
    if value > MAX_TOP_LOGPROBS:
        raise bad_params(f"top_logprobs must be at most {MAX_TOP_LOGPROBS}, not {shown(value)}")
    if value and not instance.logprobs and not instance.prompt_logprobs:
        raise bad_params("top_logprobs is given without logprobs=True or prompt_logprobs=True")


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. A wrong value raises ``RequestError``.

    Attributes:
        max_new_tokens: The most tokens to generate.
        temperature: Divides the logits before sampling; 0 takes the most likely token.
        top_k: Sample among the ``k`` most likely tokens; 0 for all.
        top_p: Sample among the fewest most likely tokens whose probabilities (after ``top_k``) add up to this.
        min_p: Then leave out the tokens that are less likely than this times the most likely one; 0 for none.
        typical_p: Then sample among the most typical tokens whose probabilities add up to this: those whose information
            is nearest to the entropy (Meister et al., arXiv 2202.00666).
        repetition_penalty: Divides the positive logits of each token of the prompt and the output, and multiplies the
            negative ones (Keskar et al., arXiv 1909.05858); 1 for none.
        frequency_penalty: Subtracted from a token's logit for each time that it was generated; from -2 to 2.
        presence_penalty: Subtracted from a token's logit if it was generated; from -2 to 2.
        logit_bias: Added to the logits of some tokens, by token id; from -100 to 100.
        no_repeat_ngram_size: No sequence of so many tokens occurs twice in the prompt and the output; 0 for any.
        bad_words_ids: Sequences of tokens that are not generated.
        suppress_tokens: Token ids that are not generated.
        begin_suppress_tokens: Token ids that are not generated as the first token of the output.
        processors: By name, registered logits processors and their options, such as ``{"guided": {"regex":
            "[0-9]+"}}``. They change logits after all of this, in the order of their names.
        min_new_tokens: The tokens that end the request are not generated before so many other tokens.
        seed: Makes sampling repeatable, in any batch; None for a fresh draw each time.
        stop: Strings that end the request; the text is cut before the first of them that is complete. The stack's
            ``max_stop_chars`` limits their total length.
        stop_token_ids: Token ids that end the request, beside the model's own. The token is part of the output, and its
            text part of the output's text, if it is no special token.
        ignore_eos: Whether to continue after the model's own end tokens.
        n: The number of samples of one prompt, which is computed once. Sample ``i`` equals the output of a single
            request with the seed ``seed + i``. The stack's ``max_samples`` limits it.
        logprobs: Whether to report the log-probability of each generated token.
        top_logprobs: Of how many of the most likely tokens to report it, too, in each position; at most 20. The
            positions are those of the generated tokens if ``logprobs``, and those of the prompt if ``prompt_logprobs``.
        prompt_logprobs: Whether to report the log-probability of each token of the prompt. The whole prompt is then
            computed, without a cached prefix, and a step holds logits for each of its tokens.
        special_tokens: Whether the output's text shows special tokens, such as the marks of a tool call. It then leaves
            out the text of the token that ended the request, whether that token is special or not. ``stop`` may hold
            special tokens.
    """

    max_new_tokens: int = attrs.field(default=64, converter=_as_int, validator=_int_at_least(1))
    temperature: float = attrs.field(default=0.0, converter=_as_float, validator=_check_temperature)
    top_k: int = attrs.field(default=0, converter=_as_int, validator=_int_at_least(0))
    top_p: float = attrs.field(default=1.0, converter=_as_float, validator=_check_mass)
    min_p: float = attrs.field(default=0.0, converter=_as_float, validator=_check_min_p)
    typical_p: float = attrs.field(default=1.0, converter=_as_float, validator=_check_mass)
    repetition_penalty: float = attrs.field(default=1.0, converter=_as_float, validator=_check_repetition_penalty)
    frequency_penalty: float = attrs.field(default=0.0, converter=_as_float, validator=_check_penalty)
    presence_penalty: float = attrs.field(default=0.0, converter=_as_float, validator=_check_penalty)
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_as_bias, validator=_check_bias, hash=False)
    no_repeat_ngram_size: int = attrs.field(default=0, converter=_as_int, validator=_int_at_least(0))
    bad_words_ids: tuple[tuple[int, ...], ...] = attrs.field(
        default=(), converter=_as_sequences, validator=_check_sequences
    )
    suppress_tokens: frozenset[int] = attrs.field(default=frozenset(), converter=_as_ids, validator=_check_ids)
    begin_suppress_tokens: frozenset[int] = attrs.field(default=frozenset(), converter=_as_ids, validator=_check_ids)
    min_new_tokens: int = attrs.field(default=0, converter=_as_int, validator=_int_at_least(0))
    processors: Mapping[str, Mapping[str, Any]] = attrs.field(
        factory=dict, converter=_as_processors, validator=_check_processors, hash=False
    )
    seed: int | None = attrs.field(
        default=None, converter=_as_int, validator=attrs.validators.optional(_int_at_least(0))
    )
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_strings, validator=_check_stop)
    stop_token_ids: frozenset[int] = attrs.field(default=frozenset(), converter=_as_ids, validator=_check_ids)
    ignore_eos: bool = attrs.field(default=False, validator=_check_flag)
    n: int = attrs.field(default=1, converter=_as_int, validator=_int_at_least(1))
    logprobs: bool = attrs.field(default=False, validator=_check_flag)
    top_logprobs: int = attrs.field(default=0, converter=_as_int, validator=_check_top_logprobs)
    prompt_logprobs: bool = attrs.field(default=False, validator=_check_flag)
    special_tokens: bool = attrs.field(default=False, validator=_check_flag)

    def of_sample(self, sample: int) -> SamplingParams:
        """Return the parameters of one of ``n`` samples, as if it were a request of its own."""
        return attrs.evolve(self, n=1, seed=None if self.seed is None else self.seed + sample)

    @cached_property
    def changes_logits(self) -> bool:
        """Whether they change logits before a token is chosen."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        bans = (self.logit_bias, self.bad_words_ids, self.suppress_tokens, self.begin_suppress_tokens)
        other_changes = (self.no_repeat_ngram_size, self.min_new_tokens, self.processors)
        return penalties != (1.0, 0.0, 0.0) or any(bans) or any(other_changes)

    @cached_property
    def has_extras(self) -> bool:
        """Whether a step does more for them than to choose a token from the logits."""
        return self.changes_logits or self.logprobs

    @cached_property
    def truncates(self) -> bool:
        """Whether a token is drawn from a part of the vocabulary."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1

    @property
    def named_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that it biases or bans."""
        words = (token for word in self.bad_words_ids for token in word)
        return self.suppress_tokens | self.begin_suppress_tokens | frozenset(words) | self.logit_bias.keys()

"""Admission: turns a prompt into token ids that can be served to the end, or refuses it with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set, Sized
from typing import Any, TypeVar

import attrs
import numpy as np

from kvframe import Hints, KVCacheManager, KVCachePlan, Stack, content_key
from kvframe.contract.errors import KVFrameError, ModelError, RequestError, shown
from kvframe.contract.foreign import safe_text
from kvframe.contract.model import LoadedModel, ModelInput
from kvframe.contract.specs import ENCODER
from kvframe_engine.requests.params import SamplingParams, bad_params
from kvframe_engine.requests.progress import NO_HINTS, NO_INPUTS, input_sequences
from kvframe_engine.requests.prompt import AnyPrompt, Prompt, unpacked

T = TypeVar("T")

check_salt = KVCacheManager.check_salt
MAX_OWNER_CHARS = 1024
"""The most characters of an owner's name."""
MAX_VOCAB_SIZE = 1 << 32
"""Token ids are stored in four bytes each."""


class Admission:
    """Checks prompts against the limits of the model and its cache.

    Attributes:
        has_text: Whether the model has a tokenizer.
        plan: The cache plan.
    """

    def __init__(
        self,
        model: LoadedModel,
        plan: KVCachePlan,
        max_model_len: int,
        secret: bytes,
        stack: Stack,
        max_prompt_len: int | None = None,
        without_ranges: str | None = None,
        *,
        caches_prefixes: bool,
    ) -> None:
        """Keep the limits.

        Args:
            model: For its tokenizer and vocabulary.
            plan: The cache plan.
            max_model_len: The most tokens of a request.
            secret: 32 bytes, for the keys of inputs.
            stack: For the most samples and characters of stop strings.
            max_prompt_len: The most tokens of a prompt, if a prompt must be computed in one step; otherwise None.
            without_ranges: A layer that does not honour bidirectional ranges of prompts, in words; None for none.
            caches_prefixes: Whether later requests find the prefixes of earlier ones.

        Raises:
            ModelError: The tokenizer raises when it decodes an empty list of tokens. Or all prompts of the model are
                bidirectional ranges, which a layer does not honour.
        """
        if model.description.bidirectional_prompts and without_ranges is not None:
            raise ModelError(
                f"{without_ranges}, does not honour bidirectional ranges, and every prompt of {model.description.name} "
                "is one; give the layer a backend with the mask 'ranges', such as torch, by a rule of the stack"
            )
        try:
            self.has_text = model.decode([]) is not None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ModelError(f"the tokenizer of {model.description.name} cannot decode: {safe_text(error)}") from error
        self._model, self._vocab_size = model, model.description.vocab_size or MAX_VOCAB_SIZE
        self._options, self._caches_prefixes = stack.engine, caches_prefixes
        self.plan = plan
        self._max_model_len = max_model_len
        self._secret = secret
        self._max_prompt_len = max_prompt_len

    def admit(self, prompt: AnyPrompt, params: SamplingParams) -> tuple[list[int], dict[str, Any]]:
        """Return a request's first tokens, and the attributes that it gets from what its prompt has beside them.

        Args:
            prompt: Text or token ids, which go to the encoder if the model has one, or a prompt of two parts.
            params: The limits of the request, and what ends it.

        Raises:
            RequestError: The request can never be served.
            ModelError: The prompt is text, and the model has no tokenizer.
        """
        description = self._model.description
        self._check_params(params)
        if not (description.max_input_lens or description.bidirectional_prompts or isinstance(prompt, Prompt)):
            return self.token_ids(prompt, params), {}
        token_ids, inputs = self._tokens_and_inputs(prompt, params)
        attributes = {
            "inputs": inputs,
            "input_sequences": input_sequences(inputs),
            "num_joint_tokens": self.num_joint_tokens(token_ids),
            "boundaries": self.boundaries(prompt, len(token_ids)),
        }
        return token_ids, attributes

    def _tokens_and_inputs(
        self, prompt: AnyPrompt, params: SamplingParams
    ) -> tuple[list[int], Mapping[str, ModelInput]]:
        name, sequences = self._model.description.name, self._model.description.max_input_lens
        if not sequences:
            if isinstance(prompt, Prompt) and prompt.encoder is not None:
                raise RequestError(f"{name} has no encoder; give a prompt of text or token ids", code="extra_input")
            tokens = prompt.decoder if isinstance(prompt, Prompt) else prompt
            return self.token_ids(() if tokens is None else tokens, params), NO_INPUTS
        whole_prompt = prompt if isinstance(prompt, Prompt) else Prompt(encoder=prompt)
        # A model may read several sequences, but a prompt brings one input at most.
        prepared = {name: self._prepare(name, whole_prompt.encoder if name == ENCODER else None) for name in sequences}
        inputs = {name: value for name, value in prepared.items() if value is not None}
        tokens = whole_prompt.decoder
        if tokens is None or isinstance(tokens, str):
            start_token_ids, text = self._model.start_token_ids, None if tokens is None else _unicode(tokens)
            tokens = _tokens_of("the model's start_token_ids", lambda: start_token_ids(text))
        return self.token_ids(tokens, params, {name: value.num_tokens for name, value in inputs.items()}), inputs

    def num_joint_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many of a prompt's tokens see each other in both directions: all, or none.

        Raises:
            RequestError: All do, and a layer does not keep so many (``prompt_too_long``).
        """
        if not self._model.description.bidirectional_prompts:
            return 0
        num_tokens = len(token_ids)
        for group in self.plan.groups:
            if not group.is_of_input and not group.keeps_all(num_tokens - 1):
                raise RequestError(
                    f"the prompt has {num_tokens} tokens, which all see each other in {self._model.description.name}; "
                    f"layers such as {group.layers[0]!r} do not keep so many",
                    code="prompt_too_long",
                )
        return num_tokens

    def boundaries(self, prompt: AnyPrompt, num_tokens: int) -> tuple[int, ...]:
        """Return where steps of a prompt of so many tokens have to end: the last whole blocks before its boundaries.

        Raises:
            RequestError: A boundary is not a number of tokens of the prompt.
        """
        if not isinstance(prompt, Prompt):
            return ()
        try:
            stated_ends = _whole_numbers(prompt.boundaries)
        except RequestError:
            stated_ends = [0]
        if stated_ends and not 1 <= min(stated_ends) <= max(stated_ends) <= num_tokens:
            raise RequestError(
                f"a prompt's boundaries are whole numbers from 1 to its number of tokens, {num_tokens}, not "
                f"{shown(prompt.boundaries)}",
                code="bad_boundaries",
            )
        if not (self._caches_prefixes and self.plan.groups):
            return ()
        ends = {end - end % self.plan.alignment for end in stated_ends}
        return tuple(sorted(ends - {0, num_tokens}))

    def _prepare(self, sequence: str, value: Any) -> ModelInput | None:
        readable_value = _unicode(value) if isinstance(value, str) else value
        if isinstance(value, Mapping):
            readable_value = unpacked(value)
        prepared = _ask(f"reading the input of the {sequence}", self._model.prepare_input, sequence, readable_value)
        longest = self._model.description.max_input_lens[sequence]
        if not isinstance(prepared, ModelInput | None):
            raise RequestError(f"the model made {shown(prepared)} of its input, no ModelInput", code="bad_input")
        if prepared is not None and prepared.num_tokens > longest:
            raise RequestError(
                f"the input of the {sequence} has {prepared.num_tokens} tokens; {self._model.description.name} takes "
                f"{longest} at most",
                code="input_too_long",
            )
        return None if prepared is None else attrs.evolve(prepared, key=content_key(self._secret, prepared.key))

    def token_ids(
        self, prompt: str | Sequence[int], params: SamplingParams | None, input_lens: Mapping[str, int] | None = None
    ) -> list[int]:
        """Return the prompt's token ids; raises ``RequestError`` if the request can never be served.

        Args:
            prompt: Text, or token ids.
            params: The limits of the request, and what ends it; None if nothing is generated.
            input_lens: The tokens of its inputs; no inputs unless given.
        """
        if isinstance(prompt, str):
            text = _unicode(prompt)
            token_ids = _tokens_of("the tokenizer", lambda: self._model.encode(text))
        else:
            self._check_length(_num_items(prompt), params)
            token_ids = _whole_numbers(prompt if isinstance(prompt, list) else unpacked(prompt))
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token", code="empty_prompt")
        self._check_length(len(token_ids), params)
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            wrong_id = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise RequestError(
                f"{shown(wrong_id)} is not a token id; the model has [0, {self._vocab_size})", code="bad_token"
            )
        if not self.plan.longest_fits:
            self._check_fits(len(token_ids) + (0 if params is None else params.max_new_tokens), input_lens or {})
        return token_ids

    def _check_fits(self, num_tokens: int, input_lens: Mapping[str, int]) -> None:
        """Raise for a request that does not fit the cache even alone, at its greatest length."""
        num_tokens = min(num_tokens, self._max_model_len)
        if not self.plan.fits(num_tokens, input_lens):
            raise RequestError(
                f"a request of {num_tokens} tokens does not fit the cache of {self.plan.total_bytes} bytes, even "
                "alone; give more memory or ask for fewer tokens",
                code="too_large",
            )

    def _check_params(self, params: SamplingParams) -> None:
        """Raise for params that no request may have, or none of this model."""
        if params.n > self._options.max_samples:
            raise bad_params(
                f"n must be at most {self._options.max_samples}, not {shown(params.n)}; raise max_samples in the "
                "stack's [engine]"
            )
        if params.stop:
            self._check_stop(params.stop)
        if params.special_tokens and _ask("the tokenizer", self._model.decode_with_special_tokens, []) is None:
            raise bad_params(f"{self._model.description.name} cannot show special tokens; leave special_tokens out")
        check_token_ids(params, self._vocab_size)

    def _check_stop(self, stop: Sequence[str]) -> None:
        """Raise for stop strings that cannot be found, or are too long altogether."""
        if not self.has_text:
            raise RequestError(
                f"{self._model.description.name} has no tokenizer, so no stop string can be found; use stop_token_ids",
                code="no_tokenizer",
            )
        num_chars, max_chars = sum(map(len, stop)), self._options.max_stop_chars
        if num_chars > max_chars:
            raise bad_params(
                f"the stop strings have {num_chars:,} characters altogether, and may have {max_chars:,}; raise "
                "max_stop_chars in the stack's [engine]"
            )

    def _check_length(self, num_tokens: int, params: SamplingParams | None) -> None:
        """Raise for a prompt that is too long.

        Args:
            num_tokens: Its tokens.
            params: None if nothing is generated.
        """
        if num_tokens > self._max_model_len - (params is not None):
            generated_part = "" if params is None else ", at least one of them generated"
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but a request has at most {self._max_model_len}{generated_part}",
                code="prompt_too_long",
            )
        if self._max_prompt_len is not None and num_tokens > self._max_prompt_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and the model computes a prompt in one step, which has at "
                f"most {self._max_prompt_len}; raise max_num_batched_tokens in the stack's [limits]",
                code="exceeds_step",
            )

    def ids_of(self, prompt: Any) -> tuple[int, ...]:
        """Return the request's own token ids, if the prompt has any before text is tokenised."""
        if isinstance(prompt, Prompt):
            prompt = prompt.decoder
        elif self._model.description.max_input_lens:
            return ()
        try:
            return tuple(_whole_numbers(unpacked(prompt)))
        except RequestError:
            return ()


def checked_params(params: Any, default: SamplingParams) -> SamplingParams:
    """Return a request's parameters: ``default`` for None.

    Raises:
        RequestError: ``params`` is neither ``SamplingParams`` nor None (``bad_params``).
    """
    if params is None:
        return default
    if not isinstance(params, SamplingParams):
        raise bad_params(f"params must be a SamplingParams or None, not {shown(params)}")
    return params


def checked_sender(cache_salt: object, owner: object, hints: Any) -> Hints:
    """Return the hints of a request, ``NO_HINTS`` for None.

    Raises:
        RequestError: The salt is wrong (``bad_salt``); the owner is not a string, or is too long (``bad_owner``); or
            the hints are neither ``Hints`` nor None (``bad_hints``).
    """
    check_salt(cache_salt)
    if not isinstance(owner, str) or len(owner) > MAX_OWNER_CHARS:
        raise RequestError(
            f"owner must be a string of at most {MAX_OWNER_CHARS:,} characters, not {shown(owner)}", code="bad_owner"
        )
    if hints is None:
        return NO_HINTS
    if not isinstance(hints, Hints):
        raise RequestError(f"hints must be a Hints or None, not {shown(hints)}", code="bad_hints")
    return hints


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise a ``RequestError`` (``bad_params``) if parameters name tokens that the model does not have."""
    if params.stop_token_ids:
        _check_known("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.changes_logits and params.named_token_ids:
        name = "logit_bias, bad_words_ids or a list of suppressed tokens"
        _check_known(name, params.named_token_ids, vocab_size)


def _check_known(name: str, ids: frozenset[int], vocab_size: int) -> None:
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong_id = next(token for token in ids if not 0 <= token < vocab_size)
        raise bad_params(f"{name} holds {shown(wrong_id)}; the model has the tokens [0, {vocab_size})")


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not Unicode text: {error.reason}", code="bad_text") from error
    return text


def _whole_numbers(prompt: Any) -> list[int]:
    try:
        # Some iterables are not sequences of ids: strings and bytes are text, and sets and mappings have no order.
        tokens = None if isinstance(prompt, bytes | bytearray | Set | Mapping | str) else list(prompt)
    except Exception:  # a foreign sequence may raise anything
        tokens = None
    if tokens is None or any(isinstance(number, bool) or not isinstance(number, int | np.integer) for number in tokens):
        raise RequestError("a prompt is text, or a sequence of whole numbers", code="bad_token")
    return [int(number) for number in tokens]


def _num_items(prompt: Any) -> int:
    """Return the number of items of a sequence without iterating over it; 0 if it has no length."""
    try:
        return len(prompt) if isinstance(prompt, Sized) else 0
    except Exception:  # for example, an array without dimensions
        return 0


def _tokens_of(what: str, ask: Callable[[], Any]) -> list[int]:
    """Return the tokens that the model makes of a text; the model may raise or return anything."""
    tokens = _ask(what, ask)
    try:
        return _whole_numbers(tokens)
    except RequestError:
        raise RequestError(
            f"{what} gave {shown(tokens)}, which is not a sequence of token ids", code="bad_token"
        ) from None


def _ask(what: str, function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function of the model; if it raises, the request is refused."""
    try:
        return function(*arguments)
    except (KVFrameError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RequestError(f"{what} failed: {safe_text(error)}", code="bad_text") from error

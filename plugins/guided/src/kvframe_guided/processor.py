"""Bans the tokens with which an answer would no longer follow its grammar. The grammars are those of llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from kvframe_engine.contract import LogitsProcessor, ProcessedRequest, Vocabulary
from llguidance import LLMatcher, LLTokenizer

from kvframe.contract import RequestError, shown

MOST_BYTES = 1 << 16
"""The most bytes of a grammar: it is compiled between two steps of the engine."""

_GRAMMARS: Mapping[str, Callable[[Any], str]] = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "json_object": lambda _: LLMatcher.grammar_from_json_schema({"type": "object"}),
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}
_TYPES: Mapping[str, tuple[type, str]] = {
    "json_schema": (dict, "an object"),
    "json_object": (bool, "true"),
    "regex": (str, "a text"),
    "lark": (str, "a text"),
}


@attrs.define(eq=False)
class _Progress:
    """How far an answer is.

    Attributes:
        matcher: It has read the answer up to its end token.
        num_read: Tokens of the answer that were looked at.
        has_ended: Whether the answer has an end token. The request may continue, if it ignores end tokens.
    """

    matcher: LLMatcher
    num_read: int = 0
    has_ended: bool = False


class Guided(LogitsProcessor):
    """Lets an answer follow a JSON schema, any JSON object, a regular expression or a Lark grammar."""

    name = "guided"

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Read the model's tokenizer, which takes about a second."""
        super().__init__(vocabulary)
        if vocabulary.tokenizer_json is None:
            raise _refusal("the model has no fast tokenizer, which a grammar of text needs")
        self._tokenizer = LLTokenizer(
            vocabulary.tokenizer_json, n_vocab=vocabulary.size, eos_token=sorted(vocabulary.eos_token_ids) or None
        )
        self._ends = sorted(vocabulary.eos_token_ids)

    def start(self, options: Mapping[str, Any]) -> _Progress:
        """Compile the grammar of a request.

        Args:
            options: One of ``json_schema``, ``json_object``, ``regex`` and ``lark``.
        """
        if len(options) != 1 or options.keys() - _GRAMMARS.keys():
            raise _refusal(f"guided takes one of {', '.join(_GRAMMARS)}, not {shown(sorted(map(str, options)))}")
        ((name, value),) = options.items()
        kind, expected = _TYPES[name]
        if not isinstance(value, kind) or value is False:
            raise _refusal(f"guided.{name} must be {expected}, not {shown(value)}")
        try:
            num_bytes = len(json.dumps(value))
            grammar = _GRAMMARS[name](value)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(f"guided.{name} is no JSON: {error}") from error
        if num_bytes > MOST_BYTES:
            raise _refusal(f"guided.{name} has {num_bytes:,} bytes, and may have {MOST_BYTES:,}")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _refusal(f"guided.{name} cannot be followed: {' '.join(matcher.get_error().split())[:200]}")
        return _Progress(matcher)

    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> None:
        """Set the logits of tokens that do not follow to minus infinity.

        Args:
            logits: ``[num_rows, vocab_size], device``.
            requests: The requests.
        """
        allowed = np.zeros((logits.shape[0], logits.shape[1]), dtype=np.bool_)
        row = 0
        for request in requests:
            progress: _Progress = request.state
            answer = list(request.token_ids[request.num_prompt_tokens + progress.num_read :])
            progress.num_read += len(answer)
            if not progress.has_ended:
                ends = [index for index, token in enumerate(answer) if token in self._ends]
                progress.has_ended = bool(ends)
                progress.matcher.consume_tokens(answer[: ends[0]] if ends else answer)
            self._fill(allowed[row : row + 1 + len(request.drafts)], progress, request.drafts)
            row += 1 + len(request.drafts)
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)

    def _fill(self, allowed: np.ndarray[Any, np.dtype[np.bool_]], progress: _Progress, drafts: Sequence[int]) -> None:
        """Mark the tokens that may follow the answer, and those that may follow each draft that follows.

        After an end token only end tokens follow.

        Args:
            allowed: ``[1 + num_drafts, vocab_size]``, all False.
            progress: The answer.
            drafts: The drafts after the answer.
        """
        matcher, has_ended, num_followed = progress.matcher, progress.has_ended, 0
        for row, draft in enumerate([*drafts, None]):
            if has_ended:
                allowed[row, self._ends] = True
            elif matcher.is_error():  # the answer has a token that does not follow: no token may come
                return
            else:
                bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
                mask = np.unpackbits(bits, bitorder="little")[: allowed.shape[1]]
                allowed[row, : len(mask)] = mask
            # A draft that does not follow is rejected, so that later rows are not read.
            if draft is None or not allowed[row, draft]:
                break
            if draft in self._ends:
                has_ended = True
            elif not matcher.try_consume_tokens([draft]):
                break
            else:
                num_followed += 1
        if num_followed:
            matcher.rollback(num_followed)


def _refusal(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_params")

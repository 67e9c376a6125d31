"""Log-probabilities of generated tokens, as OpenAI's interface gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from kvframe_serve.generation import Part

_LEAST = -9999.0
"""What stands for the logarithm of 0, which JSON does not have."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """The text and the bytes of each token of a vocabulary, found when they are asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer."""
        self._tokenizer: Any = tokenizer
        self._found: dict[int, tuple[str, bytes]] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = None if backend is None else backend.decoder
        self._byte_of = _byte_of_letters() if decoder is not None and b'"ByteLevel"' in decoder.__getstate__() else {}

    def of(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's text, as it is after another token, and its bytes.

        A token may end within a character: its text then holds a replacement character, and its bytes are exact.
        """
        token_text = self._found.get(token_id)
        if token_text is None:
            token_text = self._found[token_id] = self._read(token_id)
        return token_text

    def _read(self, token_id: int) -> tuple[str, bytes]:
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # an id beyond the vocabulary
            return "", b""
        if token_id in self._tokenizer.all_special_ids:
            return piece, piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            data = bytes([int(match[1], 16)])
        elif self._byte_of and all(letter in self._byte_of for letter in piece):
            data = bytes(self._byte_of[letter] for letter in piece)
        else:
            once, twice = (
                self._tokenizer.decode([token_id] * count, clean_up_tokenization_spaces=False) for count in (1, 2)
            )
            text = twice[len(once) :]
            return text, text.encode()
        return data.decode(errors="replace"), data


def _byte_of_letters() -> dict[str, int]:
    """Return the byte that each letter of byte-level vocabularies stands for.

    Their letters are in the order of the bytes: printable bytes are their own letters, and the others follow from
    U+0100 on (Radford et al. 2019, https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    alphabet = set(ByteLevel.alphabet())
    own_bytes = [byte for byte in range(256) if chr(byte) in alphabet]
    other_bytes = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {chr(byte): byte for byte in own_bytes} | {chr(256 + index): byte for index, byte in enumerate(other_bytes)}


def _finite(value: float) -> float:
    return value if value > _LEAST else _LEAST


class ChatLogprobs:
    """The log-probabilities of a chat's choice."""

    def __init__(self, texts: TokenTexts) -> None:
        """Take the texts of tokens."""
        self._texts = texts

    def of(self, part: Part) -> dict[str, Any]:
        """Return the log-probabilities of a part's tokens, as a chat's choice gives them."""
        tops = part.top_logprobs or [{}] * len(part.token_ids)
        content = [
            {**self._entry(token_id, value), "top_logprobs": [self._entry(*likely) for likely in top.items()]}
            for token_id, value, top in zip(part.token_ids, part.logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        text, data = self._texts.of(token_id)
        return {"token": text, "logprob": _finite(value), "bytes": list(data)}


class TextLogprobs:
    """The log-probabilities of a completion's choice, in the order of its tokens."""

    def __init__(self, texts: TokenTexts, *, with_top: bool) -> None:
        """Start before the first token.

        Args:
            texts: The texts of tokens.
            with_top: Whether the most likely tokens are asked for; the token itself is then always among them.
        """
        self._texts = texts
        self._with_top = with_top
        self._offset = 0
        self._entries: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(
        self,
        token_ids: Sequence[int],
        values: Sequence[float | None],
        tops: Sequence[Mapping[int, float] | None],
    ) -> None:
        """Add tokens.

        Args:
            token_ids: The tokens.
            values: The log-probability of each; None for the first token of a prompt.
            tops: For each, those of the most likely tokens, if they are asked for.
        """
        for index, (token_id, value) in enumerate(zip(token_ids, values, strict=True)):
            text, top = self._texts.of(token_id)[0], None
            if self._with_top and value is not None:
                # Of tokens with one text, the most likely one is reported.
                likely = (tops[index] if index < len(tops) else None) or {}
                top = {
                    self._texts.of(other_id)[0]: _finite(logprob) for other_id, logprob in reversed([*likely.items()])
                }
                top[text] = _finite(max(value, top.get(text, value)))
            self._entries.append((text, None if value is None else _finite(value), top, self._offset))
            self._offset += len(text)

    def take(self) -> dict[str, Any]:
        """Return what was added since the last call, as a completion's choice gives it."""
        entries, self._entries = self._entries, []
        return {
            "tokens": [text for text, _, _, _ in entries],
            "token_logprobs": [value for _, value, _, _ in entries],
            "top_logprobs": [top for _, _, top, _ in entries] if self._with_top else None,
            "text_offset": [offset for _, _, _, offset in entries],
        }

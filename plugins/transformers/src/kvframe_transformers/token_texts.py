"""Decodes tokens as they come, for tokenizers whose text is a text or some bytes of each token, one after the other."""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import attrs
from tokenizers import Tokenizer

_MAX_CHARACTER_BYTES = 4
"""After four bytes, none of them decides about a character of the bytes that follow."""

_BEFORE = "x"
"""A token before another one, which then has the text that it has within a text."""


@attrs.frozen(eq=False)
class TokenTexts:
    """The text of each token after other tokens.

    Attributes:
        of: By token id, the text, or the bytes of a token that may be a part of a character; None for tokens that are
            skipped: special ones, unless they are shown, and unknown ids.
        of_first: Returns the text of a token before all others.
        joins_invalid: Whether the bytes of an incomplete character become one replacement character together.
        stripped: A character that is left out at the start of the whole text.
        num_stripped: How often it is left out at most.
    """

    of: dict[int, str | bytes | None]
    of_first: Callable[[int], str | bytes | None]
    joins_invalid: bool = False
    stripped: str = ""
    num_stripped: int = 0


class TokenTextDecoder:
    """Decodes the tokens of one request: each costs one look-up.

    All text together is what the tokenizer decodes from all tokens after what it decodes from the prompt, except
    in a run of ``<0xNN>`` tokens that is not UTF-8. There, the tokenizer makes a replacement character of every byte.
    Here, the whole characters of such a run are text, and the other bytes are a replacement character each: the text
    does not wait for the end of a run, which may be a page of Thai. In both, a character that the prompt begins belongs
    to the text if the generated tokens complete it.
    """

    def __init__(self, texts: TokenTexts, token_ids: Sequence[int]) -> None:
        """Start after a prompt. Reads its last few tokens that have a text.

        Args:
            texts: The texts of the tokens.
            token_ids: The prompt.
        """
        start, size = len(token_ids), 0
        while start and size < max(_MAX_CHARACTER_BYTES, texts.num_stripped):
            start -= 1
            size += len(texts.of[token_ids[start]] or "")
        self._texts = texts
        self._is_first = start == 0
        self._num_stripped = texts.num_stripped if start == 0 else 0
        self._bytes = bytearray()
        self._prompt_end = ""
        self(token_ids[start:], False)
        # What the prompt's own text shows for a character that the prompt only begins.
        self._prompt_end = self._text_of(self._bytes, True)[0]

    def __call__(self, token_ids: Sequence[int], final: bool) -> str:
        """Return the text that is certain after these tokens, which follow those of the last call.

        Args:
            token_ids: The tokens.
            final: Whether no more tokens follow.
        """
        texts, text = self._texts.of, ""
        for token_id in token_ids:
            part = texts[token_id]
            if part is None:
                continue
            if self._is_first:
                self._is_first = False
                part = self._texts.of_first(token_id) or ""
            if isinstance(part, bytes):
                self._bytes += part
            else:
                text += self._take(True) + part if self._bytes else part
        if self._bytes:
            text += self._take(final)
        if self._num_stripped and text:
            text = self._strip(text)
        if self._prompt_end and text:
            self._prompt_end, text = without_common(self._prompt_end, text)
        return text

    def _take(self, final: bool) -> str:
        """Return the text of the bytes; unless ``final``, keep those that may begin a character."""
        text, num_read = self._text_of(self._bytes, final)
        del self._bytes[:num_read]
        return text

    def _text_of(self, data: bytearray, final: bool) -> tuple[str, int]:
        if self._texts.joins_invalid:
            return utf_8_decode(data, "replace", final)
        text, num_read = utf_8_decode(data, "surrogateescape", final)
        return text.translate(_REPLACED), num_read

    def _strip(self, text: str) -> str:
        while self._num_stripped and text.startswith(self._texts.stripped):
            self._num_stripped -= 1
            text = text[1:]
        if text:
            self._num_stripped = 0
        return text


def without_common(prompt_end: str, text: str) -> tuple[str, str]:
    """Return the end of a prompt's text, and a text that may repeat it, without their common beginning.

    Args:
        prompt_end: The part of the prompt's text that is still to be compared.
        text: The next part of the text.

    Returns:
        The part of the prompt's text to compare with the text that follows, and the part of the text that is new.
    """
    num_common = num_equal(prompt_end, text)
    return prompt_end[num_common:] if num_common == len(text) else "", text[num_common:]


def num_equal(text: str, other_text: str) -> int:
    """Return the number of characters in the common beginning of two texts."""
    differing = (
        index
        for index, (first_item, second_item) in enumerate(zip(text, other_text, strict=False))
        if first_item != second_item
    )
    return next(differing, min(len(text), len(other_text)))


@lru_cache(maxsize=8)
def token_texts_of(tokenizer: Tokenizer, special_tokens: bool) -> TokenTexts | None:
    """Return the texts of a tokenizer's tokens; None if its text is more than these texts one after the other.

    Args:
        tokenizer: The tokenizer.
        special_tokens: Whether special tokens have a text.
    """
    decoder = tokenizer.decoder
    if decoder is None:
        texts = _Texts(tokenizer, special_tokens, lambda token: f" {token}")
        return TokenTexts(texts, texts.token_of)
    stages = list(_stages_of(json.loads(decoder.__getstate__())))
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        texts = _Texts(tokenizer, special_tokens, _bytes_of_characters)
        return TokenTexts(texts, texts.__getitem__, joins_invalid=True)
    num_local = next((index for index, kind in enumerate(kinds) if kind not in _LOCAL), len(kinds))
    if kinds[num_local:] not in ([], ["Fuse"], ["ByteFallback"], ["ByteFallback", "Fuse"], *_STRIPPED):
        return None
    before = decoder.decode([_BEFORE])
    has_bytes = "ByteFallback" in kinds
    strip: dict[str, Any] = stages[-1] if kinds[-1:] == ["Strip"] else {"content": "", "start": 0, "stop": 0}
    if strip["stop"] or (has_bytes and decoder.decode([_BEFORE, "<0x41>"]) != f"{before}A"):
        return None

    def text_of(token: str) -> str | bytes:
        byte = _byte_of(token) if has_bytes else None
        return decoder.decode([_BEFORE, token])[len(before) :] if byte is None else byte

    texts = _Texts(tokenizer, special_tokens, text_of)
    if strip["start"]:
        if num_local != kinds.count("Replace"):  # the first token has another text, and the strip changes that text
            return None
        return TokenTexts(texts, texts.__getitem__, stripped=strip["content"], num_stripped=strip["start"])

    def first_of(token_id: int) -> str | bytes | None:
        return text if isinstance(text := texts[token_id], bytes) else decoder.decode([texts.token_of(token_id)])

    return TokenTexts(texts, first_of)


class _Texts(dict[int, "str | bytes | None"]):
    """The text of each token, which is computed when the token is first decoded."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: bool, text_of: Callable[[str], str | bytes]) -> None:
        super().__init__()
        added_tokens = () if special_tokens else tokenizer.get_added_tokens_decoder().values()
        self.token_of = tokenizer.id_to_token
        self._skipped = {token.content for token in added_tokens if token.special}
        self._text_of = text_of

    def __missing__(self, token_id: int) -> str | bytes | None:
        token = self.token_of(token_id)
        text = self[token_id] = None if token is None or token in self._skipped else self._text_of(token)
        return text


_LOCAL = ("Replace", "Metaspace", "WordPiece")
"""Parts of a decoder that change each token by itself, the first one otherwise."""

_STRIPPED = (["Fuse", "Strip"], ["ByteFallback", "Fuse", "Strip"])


def _stages_of(decoder: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the parts of a decoder in their order."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for part in decoder["decoders"] for stage in _stages_of(part)]


def _byte_of(token: str) -> bytes | None:
    """Return the byte of a token such as ``<0x41>``; None for other tokens."""
    if len(token.encode()) != 6 or token[:3] != "<0x" or token[-1] != ">":
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


def _bytes_of_characters(token: str) -> bytes:
    """Return the bytes of a byte-level token."""
    values = [_BYTE_OF.get(character) for character in token]
    known_values = [value for value in values if value is not None]
    # An added token may hold characters that stand for no byte; such a token is its own text.
    return bytes(known_values) if len(known_values) == len(values) else token.encode()


def _byte_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for, as GPT-2's tokenizer numbers them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other_bytes = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(other_bytes)}


_BYTE_OF = _byte_of_characters()
_REPLACED = {0xDC00 + byte: "\N{REPLACEMENT CHARACTER}" for byte in range(128, 256)}
"""Python's characters for bytes that are no character."""

"""Decodes the tokens of a byte-level tokenizer as they come: each token is a few bytes that no other token changes."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from functools import lru_cache

from tokenizers import Tokenizer, decoders


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, found when a token is first decoded; empty for special tokens and unknown ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start without tokens.

        Args:
            tokenizer: A tokenizer with a byte-level decoder.
        """
        super().__init__()
        self._token_of = tokenizer.id_to_token
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        token, found = self._token_of(token_id), b""
        if token is not None and token not in self._special:
            # An added token may hold characters that stand for no byte; such a token is its own text.
            values = [_BYTE_OF.get(character) for character in token]
            known = [value for value in values if value is not None]
            found = bytes(known) if len(known) == len(values) else token.encode()
        self[token_id] = found
        return found


@lru_cache(maxsize=8)
def bytes_of(tokenizer: Tokenizer) -> TokenBytes | None:
    """Return the bytes of a tokenizer's tokens; None if its text is more than these bytes one after the other."""
    return TokenBytes(tokenizer) if type(tokenizer.decoder) is decoders.ByteLevel else None


def decode_by_bytes(token_bytes: TokenBytes) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes the tokens of one request as they come.

    The function returns the text of all tokens since it last returned some. As long as they end within a character, or
    in bytes that are no character, it returns an empty string.

    Args:
        token_bytes: The bytes of each token.
    """
    pending = b""

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal pending
        for token_id in token_ids:
            pending += token_bytes[token_id]
        text, num_read = utf_8_decode(pending, "replace", False)
        if num_read < len(pending) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        pending = b""
        return text

    return decode


def _byte_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for, as GPT-2's tokenizer numbers them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_of_characters()

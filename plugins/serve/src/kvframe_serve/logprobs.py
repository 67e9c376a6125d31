"""Log-probabilities of generated tokens, as OpenAI's interface gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from kvframe import RequestOutput

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
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._read(token_id)
        return found

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
    own = [byte for byte in range(256) if chr(byte) in alphabet]
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _finite(value: float) -> float:
    return value if value > _LEAST else _LEAST


def of_chat(texts: TokenTexts, output: RequestOutput) -> dict[str, Any]:
    """Return the log-probabilities of an output's new tokens, as a chat's choice gives them."""

    def entry(token_id: int, value: float) -> dict[str, Any]:
        text, data = texts.of(token_id)
        return {"token": text, "logprob": _finite(value), "bytes": list(data)}

    content = [
        {**entry(token_id, value), "top_logprobs": [entry(*each) for each in top.items()]}
        for token_id, value, top in _new(output)
    ]
    return {"content": content, "refusal": None}


def of_text(texts: TokenTexts, output: RequestOutput, offset: int, *, with_top: bool) -> dict[str, Any]:
    """Return the log-probabilities of an output's new tokens, as a completion's choice gives them.

    Args:
        texts: The tokens' texts.
        output: The output.
        offset: The characters of the tokens before.
        with_top: Whether the most likely tokens are asked for; the generated one is then always among them.
    """
    tokens, values, tops, offsets = [], [], [], []
    for token_id, value, top in _new(output):
        text = texts.of(token_id)[0]
        tokens.append(text)
        values.append(_finite(value))
        # Of tokens with one text, the most likely one is reported.
        most = {texts.of(each)[0]: _finite(found) for each, found in reversed(top.items())}
        tops.append({**most, text: _finite(max(value, most.get(text, value)))})
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if with_top else None,
        "text_offset": offsets,
    }


def _new(output: RequestOutput) -> Iterator[tuple[int, float, Any]]:
    """Yield each new token, its log-probability, and those of the most likely tokens at its place."""
    assert output.logprobs is not None
    start = len(output.token_ids) - len(output.new_token_ids)
    for place in range(start, len(output.token_ids)):
        top = {} if output.top_logprobs is None else output.top_logprobs[place]
        yield output.token_ids[place], output.logprobs[place], top

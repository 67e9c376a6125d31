"""Chooses how the tokens of a request become text as they come, by the kind of the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PythonBackend, SentencePieceBackend, TokenizersBackend

from kvframe_transformers.cleaning import CleanedText
from kvframe_transformers.token_texts import TokenTextDecoder, num_equal, token_texts_of
from kvframe_transformers.windows import decode_by_windows


def decode_as_they_come(
    tokenizer: Any, token_ids: Sequence[int], special_tokens: bool
) -> Callable[[Sequence[int], bool], str]:
    """Return a function that decodes the tokens after a prompt.

    Args:
        tokenizer: A tokenizer of transformers.
        token_ids: The prompt.
        special_tokens: Whether special tokens have a text.
    """
    kind, skips = type(tokenizer), not special_tokens
    is_known = kind.decode is PreTrainedTokenizerBase.decode and kind._decode in _KNOWN
    cleans_up = is_known and _cleans_up(tokenizer)
    if not is_known or (cleans_up and kind.clean_up_tokenization is not PreTrainedTokenizerBase.clean_up_tokenization):
        return decode_by_windows(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=skips)), token_ids)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skips, clean_up_tokenization_spaces=False))

    def decode_open(ids: Sequence[int]) -> str:
        tokens = tokenizer.convert_ids_to_tokens(list(ids), skip_special_tokens=skips)
        text = str(tokenizer.convert_tokens_to_string(tokens))
        try:
            longer_text = str(tokenizer.convert_tokens_to_string([*tokens, "x"]))
        except Exception:  # it takes no token that is not in its vocabulary
            return text
        return text[: num_equal(text, longer_text)]

    decode_next: Callable[[Sequence[int], bool], str]
    if not isinstance(tokenizer, TokenizersBackend):
        decode_next = decode_by_windows(decode, token_ids, decode_open)
    elif (texts := token_texts_of(tokenizer.backend_tokenizer, special_tokens)) is not None:
        decode_next = TokenTextDecoder(texts, token_ids)
    else:
        decode_next = decode_by_windows(decode, token_ids)
    return CleanedText(decode, token_ids, decode_next) if cleans_up else decode_next


_KNOWN = (TokenizersBackend._decode, PythonBackend._decode, SentencePieceBackend._decode)
"""The ways to decode of which this module knows what they do."""


def _cleans_up(tokenizer: Any) -> bool:
    """Return whether a tokenizer cleans up spaces; transformers leaves it out for a BPE model unless it is forced."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    is_bpe = isinstance(tokenizer, TokenizersBackend) and type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return not is_bpe or getattr(tokenizer, _FORCED, True)


_FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
"""The attribute that forces it; a transformers without this attribute does not leave it out."""

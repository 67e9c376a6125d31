"""The text of tokens as they come: what the tokenizer's own stream gives is what decoding gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvframe_transformers.model import TransformersModel
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from kvframe.engine.requests.stops import StopStrings
from kvframe.engine.requests.text import MAX_WINDOW_TOKENS, TextStream

TEXTS = ["The quick brown fox doesn't jump.", "né à Zürich, 漢字 🙂🙃 e\u0301", "  two  spaces\n\tand lines\n\n"] * 3
SPECIAL = ["<s>", "</s>", "<pad>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """Return a tokenizer like GPT-2's: every byte is a token, and characters may need several."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def with_added_tokens() -> Tokenizer:
    """Return a byte-level tokenizer with further tokens, whose characters stand for bytes or not."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["Ġadded", "漢字", "é", "two words"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like Llama 2's: words begin with a bar, and unknown characters are tokens of bytes."""
    words = ["\u2581", "\u2581The", "\u2581fox", "s", "a", ".", "'", "\u2581\u2581", "n", "é"]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *BYTES, *words])}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer like T5's."""
    tokenizer = Tokenizer(tokenizer_models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=SPECIAL, unk_token="<pad>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_pieces() -> Tokenizer:
    """Return a tokenizer like BERT's: a space before each word, but for those that continue one."""
    words = ["the", "fox", "##es", "##n", "'", "t", ".", ",", "do", "n't", "jump"]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(tokenizer_models.WordPiece(vocab=vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def words() -> Tokenizer:
    """Return a tokenizer without a decoder: words with spaces between them."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, "one", "two", "three"])}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocab=vocab, unk_token="<pad>"))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@cache
def model_with(make: Callable[[], Tokenizer], *, cleans_up: bool = False) -> Any:
    """Return what decodes of a model with a tokenizer."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), clean_up_tokenization_spaces=cleans_up)
    return SimpleNamespace(tokenizer=tokenizer, size=len(tokenizer))


def text_of(model: Any, prompt: Sequence[int], new: Sequence[int], lengths: Sequence[int], *, streams: bool) -> str:
    """Return the text of new tokens that come a few at a time."""

    def decode(token_ids: Sequence[int]) -> str:
        return TransformersModel.decode(model, token_ids) or ""

    stream = TextStream(
        decode, prompt, decode_stream=(lambda ids: TransformersModel.decode_stream(model, ids)) if streams else None
    )
    num_given = 0
    for length in lengths:
        num_given = min(num_given + length, len(new))
        before = stream.text
        stream.feed([*prompt, *new[:num_given]], final=False)
        assert stream.text.startswith(before)
    stream.feed([*prompt, *new], final=True)
    return stream.text


@st.composite
def tokens_of(draw: st.DrawFn, model: Any, least: int = 0) -> tuple[list[int], list[int], list[int]]:
    """Return a prompt, new tokens, and how many of them come at a time; no id is smaller than ``least``."""
    token = st.integers(least, model.size - 1)
    prompt, new = draw(st.lists(token, max_size=8)), draw(st.lists(token, max_size=40))
    return prompt, new, draw(st.lists(st.integers(1, 5), min_size=len(new), max_size=len(new)))


@pytest.mark.parametrize("make", [byte_level, with_added_tokens, byte_fallback])
@settings(max_examples=60)
@given(data=st.data())
def test_any_bytes_come_out_as_without_a_stream(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    model = model_with(make)
    tokens = data.draw(tokens_of(model))
    assert TransformersModel.decode_stream(model, []) is not None
    assert text_of(model, *tokens, streams=False) == text_of(model, *tokens, streams=True)


def test_what_a_stream_leaves_is_decoded_from_the_start_of_a_character() -> None:
    model = model_with(byte_fallback)
    lead, tail, letter, special = (
        model.tokenizer.convert_tokens_to_ids(token) for token in ("<0xC3>", "<0xA9>", "<0x61>", "<s>")
    )
    new = [lead, *[special] * 3, tail, letter, special]
    assert "éa" == text_of(model, [], new, [1] * len(new), streams=True)


@pytest.mark.parametrize("streams", [False, True])
def test_a_context_that_begins_within_a_character_adds_nothing(streams: bool) -> None:
    model = model_with(byte_fallback)
    prompt = [model.tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    special, letter = (model.tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "s"))
    assert "s" == text_of(model, [*prompt, special, special], [letter], [1], streams=streams)


@pytest.mark.parametrize("make", [metaspace, word_pieces, words])
@settings(max_examples=60)
@given(data=st.data())
def test_words_come_out_as_when_they_are_decoded_at_once(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    model = model_with(make)
    prompt, new, lengths = data.draw(tokens_of(model, least=len(SPECIAL)))
    new = [*new, SPECIAL.index("</s>")]
    before, whole = (TransformersModel.decode(model, each) or "" for each in (prompt, [*prompt, *new]))
    assert whole[len(before) :] == text_of(model, prompt, new, lengths, streams=True)


@pytest.mark.parametrize("make", [byte_level, with_added_tokens])
@given(data=st.data())
def test_bytes_come_out_token_by_token(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    model = model_with(make)
    decode, found = TransformersModel.decode_stream(model, []), ""
    assert decode is not None
    token_ids = data.draw(st.lists(st.integers(0, model.size + 1), max_size=40))
    for token_id in token_ids:
        found += decode([token_id])
    assert (TransformersModel.decode(model, token_ids) or "").startswith(found)
    # The last bytes may begin a character. A letter ends it.
    letter = model.tokenizer.convert_tokens_to_ids("a")
    assert TransformersModel.decode(model, [*token_ids, letter]) == found + decode([letter])


def test_a_tokenizer_that_cleans_up_has_no_stream() -> None:
    assert TransformersModel.decode_stream(model_with(word_pieces, cleans_up=True), []) is None


def decode_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def test_a_stream_that_fails_is_replaced_by_decoding() -> None:
    calls: list[int] = []

    def start(_: Sequence[int]) -> Callable[[Sequence[int]], str]:
        def decode_next(new: Sequence[int]) -> str:
            calls.extend(new)
            if len(calls) == 3:
                raise ValueError("no prefix")
            return decode_bytes(new)

        return decode_next

    stream = TextStream(decode_bytes, [*b"at"], decode_stream=start)
    for count in range(1, 7):
        stream.feed([*b"at", *b"abcdef"[:count]], final=False)
    assert ("abcdef", [*b"abc"]) == (stream.text, calls)


def test_a_stream_that_gives_nothing_is_given_up_after_a_window() -> None:
    calls: list[int] = []

    def start(_: Sequence[int]) -> Callable[[Sequence[int]], str]:
        def decode_next(new: Sequence[int]) -> str:
            calls.extend(new)
            return ""

        return decode_next

    stream = TextStream(decode_bytes, [], StopStrings(()), start)
    text = b"a" * (2 * MAX_WINDOW_TOKENS)
    for count in range(1, 1 + len(text)):
        stream.feed(text[:count], final=False)
    assert (text.decode(), MAX_WINDOW_TOKENS + 1) == (stream.text, len(calls))


def test_a_prompt_that_ends_within_a_character_is_decoded_without_a_stream() -> None:
    prompt = [*"né".encode()][:-1]
    stream = TextStream(decode_bytes, prompt, decode_stream=lambda _: pytest.fail("it was started"))
    stream.feed([*"née".encode()], final=True)
    assert "ée" == stream.text

"""The text of tokens as they come is the text of all tokens, for all kinds of tokenizers and divisions into calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kvframe_engine.requests.stops import NO_STOPS, StopStrings
from kvframe_engine.requests.text import TextStream
from kvframe_transformers.cleaning import CleanedText
from kvframe_transformers.decoding import decode_as_they_come
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.token_texts import TokenTextDecoder, TokenTexts
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast, PythonBackend

from tests.support.models import trained_tokenizer

TEXTS = ["The quick brown fox doesn't jump.", "né à Zürich, 漢字 🙂🙃 e\u0301", "  two  spaces\n\tand lines\n\n"] * 3
SPECIAL = ["<s>", "</s>", "<pad>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "\u2581",
    "\u2581The",
    "\u2581fox",
    "s",
    "a",
    ".",
    "'",
    "\u2581\u2581",
    "n",
    "é",
    "<0xzz>",
    "\u2581'",
    "'t",
    "\u2581n",
]
MARK = "<\N{FULLWIDTH VERTICAL LINE}tool\u2581calls\N{FULLWIDTH VERTICAL LINE}>"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Tokenizer:
    """Return a tokenizer like GPT-2's: every byte is a token, and characters may need several."""
    return trained_tokenizer(TEXTS, 400, SPECIAL)


def with_added_tokens() -> Tokenizer:
    """Return a byte-level tokenizer with further tokens, whose characters stand for bytes or not."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["Ġadded", "漢字", "é", "two words"])
    tokenizer.add_special_tokens([MARK, "Ġspecial"])
    return tokenizer


def with_bytes(*after: Any) -> Tokenizer:
    """Return a tokenizer whose unknown characters are tokens of bytes, with further parts of its decoder."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *BYTES, *WORDS])}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like Llama 2's: the space of the first word is left out."""
    return with_bytes(decoders.Strip(" ", 1, 0))


def byte_fallback_with_spaces() -> Tokenizer:
    """Return a tokenizer like Gemma's."""
    return with_bytes()


def byte_fallback_after_words() -> Tokenizer:
    """Return a tokenizer that leaves the bar of its first token out, and has tokens of bytes."""
    tokenizer = with_bytes()
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def unigram(decoder: Any) -> Tokenizer:
    """Return a tokenizer of the words, with this decoder."""
    vocab = [*((token, 0.0) for token in SPECIAL), *((token, -1.0) for token in WORDS)]
    tokenizer = Tokenizer(tokenizer_models.Unigram(vocab, unk_id=2))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer like T5's."""
    return unigram(decoders.Metaspace())


def metaspace_never() -> Tokenizer:
    return unigram(decoders.Metaspace(prepend_scheme="never"))


def replaced() -> Tokenizer:
    return unigram(decoders.Sequence([decoders.Replace("\u2581", " ")]))


def stripped_tokens() -> Tokenizer:
    """Return a tokenizer that strips each token."""
    return unigram(decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)]))


def stripped_starts() -> Tokenizer:
    return unigram(decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]))


def suffixed() -> Tokenizer:
    """Return a tokenizer like GPT-1's: a mark ends a word, and is a space unless the text ends there."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, "a", "b</w>", "c</w>", "</w>"])}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_pieces() -> Tokenizer:
    """Return a tokenizer like BERT's: a space before each word, but for those that continue one."""
    words = ["the", "fox", "##es", "##n", "'", "t", ".", ",", "do", "n't", "jump", "s", "n"]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(tokenizer_models.WordPiece(vocab=vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_pieces_with_spaces() -> Tokenizer:
    """Return the same tokenizer with a decoder that does not clean up."""
    tokenizer = word_pieces()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def words() -> Tokenizer:
    """Return a tokenizer without a decoder: words with spaces between them."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, "one", "two", "three"])}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocab=vocab, unk_token="<pad>"))
    tokenizer.add_tokens(["added"])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


class SlowTokenizer(PythonBackend):
    """A tokenizer in Python, like CTRL's: a mark joins a token with the next one."""

    def __init__(self, **options: Any) -> None:
        self._tokens = [*SPECIAL, "he@@", "llo", "x", ".", "'", "s", "n't", "@@", "'m"]
        super().__init__(bos_token="<s>", eos_token="</s>", pad_token="<pad>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self._tokens)}

    def _convert_token_to_id(self, token: str) -> int:
        return self._tokens.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokens[index] if index < len(self._tokens) else "<pad>"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens).replace("@@ ", "").strip()


def of_bytes() -> Any:
    """Return a tokenizer in Python whose tokens are bytes; those that are no character have no text."""
    return ByT5Tokenizer(extra_ids=2)


@cache
def model_with(make: Callable[..., Any], *, cleans_up: bool = False) -> Any:
    """Return what decodes of a model with a tokenizer."""
    tokenizer = (
        make() if make is of_bytes else make(clean_up_tokenization_spaces=cleans_up) if make is SlowTokenizer else None
    )
    if tokenizer is None:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), clean_up_tokenization_spaces=cleans_up)
    return SimpleNamespace(tokenizer=tokenizer, size=len(tokenizer))


def decoded(model: Any, token_ids: Sequence[int], special_tokens: bool = False) -> str:
    """Return the text of all tokens at once."""
    decode = TransformersModel.decode_with_special_tokens if special_tokens else TransformersModel.decode
    return decode(model, token_ids) or ""


def expected_text(prompt_text: str, whole_text: str) -> str:
    """Return the whole text after its common beginning with the prompt's."""
    size = len(prompt_text)
    while not whole_text.startswith(prompt_text[:size]):
        size -= 1
    return whole_text[size:]


def text_of(
    model: Any,
    prompt: Sequence[int],
    new: Sequence[int],
    lengths: Sequence[int] = (),
    *,
    special_tokens: bool = False,
    stop: StopStrings = NO_STOPS,
) -> str:
    """Return the text of new tokens that come in calls of these lengths, or one by one."""
    stream = TextStream(
        lambda ids: TransformersModel.decode_stream(model, ids, special_tokens=special_tokens), prompt, stop
    )
    num_given = 0
    for length in [*lengths, *[1] * len(new)]:
        num_given = min(num_given + length, len(new))
        before = stream.text
        stream.feed([*prompt, *new[:num_given]], final=False)
        assert stream.text.startswith(before)
    stream.feed([*prompt, *new], final=True)
    return stream.text


@st.composite
def tokens_of(draw: st.DrawFn, model: Any, more: int = 0) -> tuple[list[int], list[int], list[int]]:
    """Return a prompt, new tokens, and the lengths of the first calls; ``more`` ids have no token."""
    token = st.integers(0, model.size - 1 + more)
    prompt, new = draw(st.lists(token, max_size=12)), draw(st.lists(token, max_size=40))
    return prompt, new, draw(st.lists(st.integers(1, 20), max_size=8))


EXACT = [
    byte_level,
    with_added_tokens,
    metaspace,
    metaspace_never,
    replaced,
    stripped_tokens,
    stripped_starts,
    word_pieces,
    word_pieces_with_spaces,
    words,
    suffixed,
]


@pytest.mark.parametrize("special_tokens", [False, True])
@pytest.mark.parametrize("make", EXACT)
@given(data=st.data())
def test_any_tokens_have_the_text_that_they_have_at_once(
    make: Callable[[], Tokenizer], special_tokens: bool, data: st.DataObject
) -> None:
    model = model_with(make)
    prompt, new, lengths = data.draw(tokens_of(model, more=2))
    before, text = (decoded(model, ids, special_tokens) for ids in (prompt, [*prompt, *new]))
    assert expected_text(before, text) == text_of(model, prompt, new, lengths, special_tokens=special_tokens)


@pytest.mark.parametrize("make", [metaspace, metaspace_never, word_pieces, word_pieces_with_spaces, words])
@given(data=st.data())
def test_any_tokens_have_the_cleaned_text_that_they_have_at_once(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    model = model_with(make, cleans_up=True)
    prompt, new, lengths = data.draw(tokens_of(model, more=2))
    before, text = decoded(model, prompt), decoded(model, [*prompt, *new])
    assert expected_text(before, text) == text_of(model, prompt, new, lengths)


@pytest.mark.parametrize("special_tokens", [False, True])
@pytest.mark.parametrize(("make", "cleans_up"), [(SlowTokenizer, False), (SlowTokenizer, True), (of_bytes, False)])
@given(data=st.data())
def test_tokenizers_in_python_give_the_text_that_they_give_at_once(
    make: Callable[..., Any], cleans_up: bool, special_tokens: bool, data: st.DataObject
) -> None:
    model = model_with(make, cleans_up=cleans_up)
    prompt, new, lengths = data.draw(tokens_of(model))
    before, text = (decoded(model, ids, special_tokens) for ids in (prompt, [*prompt, *new]))
    if cleans_up:  # cleaning is exact only if no mark at the prompt's end joins it with what follows
        options = {"skip_special_tokens": not special_tokens, "clean_up_tokenization_spaces": False}
        uncleaned = [model.tokenizer.decode(ids, **options) for ids in (prompt, [*prompt, *new])]
        assume(uncleaned[1].startswith(uncleaned[0]))
    assert expected_text(before, text) == text_of(model, prompt, new, lengths, special_tokens=special_tokens)


# --- tokens of bytes --------------------------------------------------------------------------------------------------

FALLBACKS = [byte_fallback, byte_fallback_with_spaces, byte_fallback_after_words]


def decoded_run(run: Sequence[int]) -> list[str]:
    """Return the characters of a run of bytes, and a mark for every byte that is in none."""
    characters = bytes(run).decode(errors="surrogateescape")
    return [UNFINISHED if "\udc80" <= character <= "\udcff" else character for character in characters]


def decoded_with_characters(model: Any, token_ids: Sequence[int]) -> str:
    """Return the text of all tokens at once, in which a run of bytes keeps its characters."""
    parts: list[str] = []
    run: list[int] = []
    for token in [*model.tokenizer.convert_ids_to_tokens(list(token_ids)), None]:
        if token in SPECIAL:
            continue
        if token in BYTES:
            run.append(BYTES.index(token))
            continue
        parts += decoded_run(run)
        run = []
        parts += [] if token is None else [token]
    text: str = model.tokenizer.backend_tokenizer.decoder.decode(parts)
    return text


@pytest.mark.parametrize("make", FALLBACKS)
@given(data=st.data())
def test_any_bytes_have_the_text_that_they_have_at_once_with_all_characters(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    model = model_with(make)
    prompt, new, lengths = data.draw(tokens_of(model))
    before, text = (decoded_with_characters(model, ids) for ids in (prompt, [*prompt, *new]))
    assert expected_text(before, text) == text_of(model, prompt, new, lengths)


@st.composite
def valid_tokens_of(draw: st.DrawFn, model: Any, max_size: int) -> list[int]:
    """Return tokens with valid characters, some of them made of tokens of bytes."""
    convert = model.tokenizer.convert_tokens_to_ids
    part = st.one_of(
        st.sampled_from([*SPECIAL, *WORDS]).map(lambda token: [convert(token)]),
        st.sampled_from(["깰", "ไทย", "🙂", "é", " ", "a"]).map(
            lambda text: [convert(BYTES[byte]) for byte in text.encode()]
        ),
    )
    return [token for tokens in draw(st.lists(part, max_size=max_size)) for token in tokens]


@pytest.mark.parametrize("make", FALLBACKS)
@given(data=st.data())
def test_valid_characters_of_bytes_have_the_text_of_the_tokenizer(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    model = model_with(make)
    prompt, new = data.draw(valid_tokens_of(model, 8)), data.draw(valid_tokens_of(model, 12))
    before, text = decoded(model, prompt), decoded(model, [*prompt, *new])
    assert text[len(before) :] == text_of(model, prompt, new, data.draw(st.lists(st.integers(1, 9), max_size=8)))


def bytes_of(model: Any, text: str) -> list[int]:
    ids: list[int] = model.tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in text.encode()])
    return ids


def test_a_prompt_that_ends_in_bytes_does_not_spoil_the_bytes_that_follow() -> None:
    model = model_with(byte_fallback)
    assert "깰" == text_of(model, bytes_of(model, "깰깰"), bytes_of(model, "깰"))


def test_a_stop_string_of_bytes_is_found_after_bytes() -> None:
    model = model_with(byte_fallback)
    new = bytes_of(model, "깰ไทย🙂깰")
    assert "깰ไทย" == text_of(model, bytes_of(model, "깰깰"), new, stop=StopStrings(("🙂",)))


def test_a_byte_that_is_no_character_leaves_the_characters_beside_it() -> None:
    model = model_with(byte_fallback)
    (stray,) = model.tokenizer.convert_tokens_to_ids(["<0xE0>"])
    new = [*bytes_of(model, "깰"), stray, *bytes_of(model, "깰")]
    assert "깰\N{REPLACEMENT CHARACTER}깰" == text_of(model, [], new) == text_of(model, [], new, [len(new)])


def test_characters_come_out_before_a_run_of_bytes_ends() -> None:
    model = model_with(byte_fallback)
    decode_next = TransformersModel.decode_stream(model, bytes_of(model, "깰"))
    assert ["", "", "ไ"] * 2 == [decode_next([token], False) for token in bytes_of(model, "ไไ")]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_character_may_have_special_tokens_in_it(make: Callable[[], Tokenizer]) -> None:
    model = model_with(make)
    lead, tail = bytes_of(model, "é") if make is byte_fallback else model.tokenizer.convert_tokens_to_ids(["Ã", "©"])
    assert "é" == text_of(model, [0, lead, 1], [0, 0, tail])


# --- special tokens, cleaned text, other kinds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "new", "expected"),
    [
        (byte_level, ["T", "</s>", "Ġ", "<s>"], "T</s> <s>"),
        (with_added_tokens, [MARK, "Ġspecial"], f"{MARK} special"),
        (byte_fallback, ["</s>", "▁fox"], "</s> fox"),
        (word_pieces, ["the", "</s>", "fox"], " the </s> fox"),
        (SlowTokenizer, ["he@@", "llo", "</s>"], " hello </s>"),
    ],
)
def test_special_tokens_have_a_text_if_they_are_shown(make: Callable[..., Any], new: list[str], expected: str) -> None:
    model = model_with(make)
    ids = model.tokenizer.convert_tokens_to_ids(new)
    assert expected == text_of(model, [0], ids, special_tokens=True)


def test_a_special_token_may_be_a_stop_string() -> None:
    model = model_with(byte_level)
    new = model.tokenizer.convert_tokens_to_ids(["T", "<s>", "T"])
    assert "T" == text_of(model, [], new, special_tokens=True, stop=StopStrings(("<s>",)))


@pytest.mark.parametrize(
    ("prompt", "new", "expected"),
    [
        (["▁fox"], ["▁", ".", "▁", "s"], ". s"),
        (["▁fox", "▁"], [".", "▁", "s"], ". s"),
        (["▁fox", "▁'"], ["▁", "s"], "'s"),
        (["▁fox", "▁n"], ["'t"], "n't"),
        (["▁fox", "▁n"], ["s"], "s"),
        (["▁fox", "▁'"], ["s"], "'s"),
    ],
)
def test_clean_up_that_reaches_into_the_prompt(prompt: list[str], new: list[str], expected: str) -> None:
    model = model_with(metaspace, cleans_up=True)
    ids = [model.tokenizer.convert_tokens_to_ids(tokens) for tokens in (prompt, new)]
    assert expected == text_of(model, *ids)


def test_a_bpe_tokenizer_is_not_cleaned_up() -> None:
    model = model_with(byte_fallback_with_spaces, cleans_up=True)
    new = model.tokenizer.convert_tokens_to_ids(["a", "▁", ".", "a"])
    assert "a .a" == decoded(model, new) == text_of(model, [], new)


@given(text=st.text(" .'nmstvre", max_size=40), cut=st.integers(0, 40), lengths=st.lists(st.integers(0, 5)))
def test_a_text_is_cleaned_up_in_parts_as_it_is_at_once(text: str, cut: int, lengths: list[int]) -> None:
    clean_up = model_with(metaspace).tokenizer.clean_up_tokenization
    rest, parts = text[cut:], []
    for length in lengths:
        parts.append(rest[:length])
        rest = rest[length:]
    waiting = iter([*parts, rest])
    cleaned = CleanedText("".join, list(text[:cut]), lambda token_ids, final: next(waiting))  # type: ignore[arg-type]
    new = "".join(cleaned([], False) for _ in parts) + cleaned([], True)
    assert expected_text(clean_up(text[:cut]), clean_up(text)) == new


class OwnDecode(PreTrainedTokenizerFast):
    """A tokenizer that decodes in a way of its own."""

    def _decode(self, token_ids: Any, **options: Any) -> str:
        return super()._decode(token_ids, **options).upper()


class OwnCleanUp(PreTrainedTokenizerFast):
    """A tokenizer that cleans up in a way of its own."""

    def clean_up_tokenization(self, text: str) -> str:
        return text.replace(".", "!")


@pytest.mark.parametrize(("kind", "expected"), [(OwnDecode, " FOX. THE"), (OwnCleanUp, " fox! the")])
def test_a_tokenizer_with_its_own_methods_is_asked(kind: type[PreTrainedTokenizerFast], expected: str) -> None:
    tokenizer = kind(tokenizer_object=word_pieces(), clean_up_tokenization_spaces=True)
    prompt, *new = (tokenizer.convert_tokens_to_ids(token) for token in ("the", "fox", ".", "the"))
    assert expected == text_of(SimpleNamespace(tokenizer=tokenizer), [prompt], new)


def test_only_the_end_of_a_prompt_is_read() -> None:
    class Counted(dict[int, str | bytes | None]):
        def __missing__(self, token_id: int) -> str | bytes | None:
            read.append(token_id)
            return None if token_id == 0 else "word"

    read: list[int] = []
    TokenTextDecoder(TokenTexts(Counted(), lambda token_id: "word"), [*range(1, 10_000), 0, 0])
    assert {0, 9999} == set(read)


def test_what_decodes_is_chosen_by_the_kind() -> None:
    kinds = {
        make.__name__: type(decode_as_they_come(model_with(make).tokenizer, [], False)).__name__
        for make in (byte_level, byte_fallback, metaspace, word_pieces, words, suffixed, SlowTokenizer)
    }
    assert {name for name, kind in kinds.items() if kind != "TokenTextDecoder"} == {
        "suffixed",
        "SlowTokenizer",
    }

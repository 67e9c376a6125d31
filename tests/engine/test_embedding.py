"""The embedder: texts of mixed lengths in continuous batches, with every pooling, with and without a cache."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.embedding import EmbeddingOutput

from kvframe import Embedder, Engine, Hints, Prompt, Setup, load_plugins
from kvframe.config.stack import Stack
from kvframe.contract.description import LayerDescription, ModelDescription, Pooling
from kvframe.contract.errors import ModelError, RequestError
from kvframe.contract.model import LoadedModel
from tests.stacks import tables_of
from tests.support.engines import held_pages, requests_of, scheduler_of

KV = {"num_kv_heads": 1, "head_size": 4}
QUERY = {"num_heads": 1, "head_size": 4, "scale": 1.0}


def layers(kind: str) -> tuple[LayerDescription, ...]:
    return (LayerDescription(name="layer", kind=kind, options=KV, query=QUERY),)


class Echo(LoadedModel):
    """A token's hidden state is its id, its position and a one, so embeddings are plain numbers.

    ``kind`` names the spec of its one layer; None for a model without layers.
    """

    def __init__(self, kind: str | None = "encoder_only", *, says: Pooling | None = None) -> None:
        self.says = says
        self.is_attached = False
        self.seen: list[list[int]] = []
        self.fails = False
        self.description = ModelDescription(
            name="echo",
            layers=() if kind is None else layers(kind),
            max_model_len=40,
            vocab_size=100,
            generates=kind not in (None, "encoder_only"),
        )

    def without_head(self) -> LoadedModel:
        return self

    def pooling(self) -> Pooling | None:
        return self.says

    def attach(self, layers: Any) -> None:
        self.is_attached = True

    def detach(self) -> None:
        self.is_attached = False

    def self_check(self, run_packed: Any) -> None:
        assert [[[5, 0, 1], [6, 1, 1]], [[7, 0, 1]]] == [each.tolist() for each in run_packed([[5, 6], [7]])]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("out of order")
        self.seen.append(input_ids.tolist())
        hidden = torch.stack([input_ids, positions, torch.ones_like(positions)], dim=1).float()
        hidden[input_ids == 99] = math.nan
        return hidden[logits_indices]

    def encode(self, text: str) -> list[int]:
        return list(map(int, text.split()))

    def embedder(self, *, pooling: Any = None, normalize: bool | None = None, **options: Any) -> Embedder:
        """Return an embedder with blocks of 4 tokens and 16 KiB of cache unless the options differ."""
        stack = Stack.from_mapping(tables_of(**{"block_size": 4, "memory": 16 * 1024, **options}))
        registry = load_plugins().registry
        return Embedder(
            self,
            Setup.of(self.description, stack, registry, dtype="float32"),
            pooling=pooling,
            normalize=normalize,
            poison_freed=True,
        )


def vectors(outputs: Sequence[EmbeddingOutput]) -> list[tuple[float, ...]]:
    assert {"computed"} == {output.finish_reason for output in outputs}
    assert {None} == {output.error for output in outputs}
    return [output.embedding or () for output in outputs]


def by_hand(token_ids: Sequence[int], mode: str) -> tuple[float, ...]:
    """Return the embedding by the definition of a pooling."""
    states = [(token, position, 1.0) for position, token in enumerate(token_ids)]
    if mode == "mean":
        return tuple(sum(column) / len(states) for column in zip(*states, strict=True))
    return states[0] if mode == "cls" else states[-1]


# --- what an embedding is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"), [("mean", (4.0, 1.0, 1.0)), ("cls", (2.0, 0.0, 1.0)), ("last", (6.0, 2.0, 1.0))]
)
def test_a_pooling_says_whose_hidden_states_make_an_embedding(mode: str, expected: tuple[float, ...]) -> None:
    with Echo().embedder(pooling=mode) as embedder:
        assert [expected] == vectors(embedder.embed([[2, 4, 6]]))


def test_a_normalized_embedding_has_the_length_one() -> None:
    with Echo().embedder(pooling="last", normalize=True) as embedder:
        (found,) = vectors(embedder.embed([[7, 2]]))
    assert pytest.approx((2 / math.sqrt(6), 1 / math.sqrt(6), 1 / math.sqrt(6))) == found


def test_an_encoder_pools_all_tokens_and_a_decoder_the_last_one() -> None:
    for kind, mode in (("encoder_only", "mean"), (None, "mean"), ("full_attention", "last")):
        with Echo(kind).embedder() as embedder:
            assert Pooling(mode, False) == embedder.pooling


def test_what_the_checkpoint_says_is_taken_unless_it_is_asked_otherwise() -> None:
    model = Echo(says=Pooling("cls", True))
    for asked, expected in (
        ({}, Pooling("cls", True)),
        ({"pooling": "last"}, Pooling("last", True)),
        ({"normalize": False}, Pooling("cls", False)),
        ({"pooling": "mean", "normalize": False}, Pooling("mean", False)),
    ):
        with model.embedder(**asked) as embedder:  # type: ignore[arg-type]
            assert expected == embedder.pooling


def test_an_unknown_pooling_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="pooling must be one of mean, cls, last, not 'max'"):
        Echo().embedder(pooling="max")


# --- continuous batches -----------------------------------------------------------------------------------------------


def test_texts_of_mixed_lengths_share_steps_and_wait_until_all_of_one_fits() -> None:
    model = Echo()
    with model.embedder(max_num_batched_tokens=8, self_check=False) as embedder:
        texts = [[1] * 5, [2] * 3, [3] * 6, [4] * 8, [5]]
        assert [by_hand(text, "mean") for text in texts] == vectors(embedder.embed(texts))
        assert [[1] * 5 + [2] * 3, [3] * 6, [4] * 8, [5]] == model.seen
        stats = embedder.stats()
    assert (4, 23, 23, 0) == (stats.steps, stats.prompt_tokens, stats.computed_tokens, stats.generated_tokens)


def test_texts_are_added_while_others_run() -> None:
    with Echo().embedder(max_num_seqs=2) as embedder:
        first, second, third = (embedder.add_request([each]) for each in (10, 20, 30))
        assert [first, second] == [output.request_id for output in embedder.step()]
        fourth = embedder.add_request([40])
        assert [(third, (30.0, 0.0, 1.0)), (fourth, (40.0, 0.0, 1.0))] == [
            (output.request_id, output.embedding) for output in embedder.step()
        ]
        assert not embedder.has_unfinished


def test_owners_of_texts_take_turns() -> None:
    with Echo().embedder(max_num_seqs=2) as embedder:
        for index in range(6):
            embedder.add_request([10], f"many{index}", owner="many")
        embedder.add_request([20], "few", owner="few")
        assert ["many0", "few"] == [output.request_id for output in embedder.step()]
        outputs = embedder.embed([[30], [40]], owner=["many", "few"])
        assert [(30.0, 0.0, 1.0), (40.0, 0.0, 1.0)] == [output.embedding for output in outputs]


def test_urgent_texts_are_computed_first() -> None:
    with Echo().embedder(max_num_seqs=1, scheduling="priority") as embedder:
        embedder.add_request([10], "batch", hints=Hints(priority=1))
        embedder.add_request([20], "urgent")
        assert ["urgent"] == [output.request_id for output in embedder.step()]
        outputs = embedder.embed([[30], [40]], hints=[Hints(priority=1), None])
        assert [(30.0, 0.0, 1.0), (40.0, 0.0, 1.0)] == [output.embedding for output in outputs]
        for hints in (5, [Hints()]):
            with pytest.raises(RequestError, match="hints"):
                embedder.embed([[30], [40]], hints=hints)  # type: ignore[arg-type]


def test_progress_counts_texts() -> None:
    counts: list[int] = []
    with Echo().embedder(max_num_seqs=2) as embedder:
        embedder.embed([[1], [], [2], [3]], on_progress=counts.append)
    assert [3, 4] == counts


def test_text_is_encoded_by_the_models_tokenizer() -> None:
    with Echo().embedder(pooling="last") as embedder:
        (output,) = embedder.embed(["8 9"])
    assert ((8, 9), (9.0, 1.0, 1.0)) == (output.token_ids, output.embedding)


# --- without a cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "encoder_only"])
def test_nothing_is_allocated_where_nothing_is_kept(kind: str | None) -> None:
    with Echo(kind).embedder(memory="1GiB") as embedder:
        embedder.embed([[1, 2], [1, 2], [3]])
        stats = embedder.stats()
    assert (0, (), 0, ()) == (stats.cache_bytes, stats.blocks_held, stats.peak_bytes_held, embedder.plan.groups)
    assert (0, 0, 0) == (stats.cached_prompt_tokens, stats.preemptions, stats.evictions)


@pytest.mark.parametrize("kind", [None, "encoder_only"])
def test_memory_is_neither_looked_at_nor_checked(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> int:
        raise AssertionError("nothing is kept, and free memory was asked for")

    monkeypatch.setattr("kvframe.planning.sizing._available_bytes", refuse)
    for memory in ("auto", 1):
        with Echo(kind).embedder(memory=memory) as embedder:
            assert [by_hand([3, 4], "mean")] == vectors(embedder.embed([[3, 4]]))
            assert 0 == embedder.plan.num_slabs


@pytest.mark.parametrize("kind", [None, "encoder_only"])
def test_it_is_said_once(kind: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvframe")
    with Echo(kind).embedder() as embedder:
        for _ in range(3):
            embedder.embed([[1, 2], [3]])
    assert [
        "echo: no layer keeps anything of the past: each prompt is computed in one step, and no prefix is cached"
    ] == [message for message in caplog.messages if "runs on" not in message]


def test_a_decoder_has_nothing_of_the_kind_to_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvframe")
    with Echo("full_attention").embedder() as embedder:
        embedder.embed([[1, 2], [3]])
    assert [] == [message for message in caplog.messages if "runs on" not in message]


def test_a_text_that_no_step_has_room_for_is_refused() -> None:
    with Echo().embedder(max_num_batched_tokens=8) as embedder:
        with pytest.raises(RequestError, match="9 tokens, and the model computes a prompt in one step") as caught:
            embedder.add_request([1] * 9)
        assert "exceeds_step" == caught.value.code
        assert 1 == len(vectors(embedder.embed([[1] * 8])))


def test_the_longest_text_is_as_long_as_the_model_takes() -> None:
    with Echo().embedder() as embedder:
        assert [by_hand([1] * 40, "mean")] == vectors(embedder.embed([[1] * 40]))
        with pytest.raises(RequestError, match=r"the prompt has 41 tokens, but a request has at most 40$"):
            embedder.add_request([1] * 41)


# --- a decoder with its cache -----------------------------------------------------------------------------------------


def test_a_common_beginning_is_computed_once_where_the_last_token_is_pooled() -> None:
    with Echo("full_attention").embedder() as embedder:
        embedder.embed([[*range(12), 50]])
        before = embedder.stats().computed_tokens
        assert [(51.0, 12.0, 1.0)] == vectors(embedder.embed([[*range(12), 51]]))
        assert (1, 12) == (embedder.stats().computed_tokens - before, embedder.stats().cached_prompt_tokens)


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_other_tokens_are_pooled_of_whole_texts(mode: str) -> None:
    with Echo("full_attention").embedder(pooling=mode) as embedder:
        texts = [[*range(12), 50], [*range(12), 51]]
        for text in texts:
            assert [pytest.approx(by_hand(text, mode))] == vectors(embedder.embed([text]))
        assert 0 == embedder.stats().cached_prompt_tokens


@given(
    st.sampled_from(["mean", "cls", "last"]),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=7),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([None, 4096]),
)
def test_chunks_prefixes_preemption_and_host_memory_change_nothing(
    mode: str, texts: list[list[int]], chunk: int, tight: bool, host_memory: int | None
) -> None:
    memory = 2048 if tight else 16 * 1024
    options = {"host_memory": host_memory, "max_num_batched_tokens": chunk}
    with Echo("full_attention").embedder(pooling=mode, memory=memory, self_check=False, **options) as embedder:
        assert [pytest.approx(by_hand(text, mode)) for text in texts] == vectors(embedder.embed(texts))
        assert 0 == held_pages(embedder)


@pytest.mark.parametrize("mode", ["mean", "cls", "last"])
def test_a_text_that_loses_its_blocks_half_way_is_not_pooled_twice(mode: str) -> None:
    options = {"max_num_batched_tokens": 6, "self_check": False}
    text = [7, *range(18)]
    for num_steps in (1, 2, 3):
        with Echo("full_attention").embedder(pooling=mode, prefix_caching=False, **options) as embedder:
            request_id = embedder.add_request(text)
            for _ in range(num_steps):
                assert [] == embedder.step()
            scheduler_of(embedder)._preempt(requests_of(embedder)[request_id])
            outputs = [output for _ in range(num_steps + 4) for output in embedder.step()]
            assert [pytest.approx(by_hand(text, mode))] == vectors(outputs)
            assert 19 + 6 * num_steps == embedder.stats().computed_tokens
            assert 0 == held_pages(embedder)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_refused_texts_are_reported_in_their_places() -> None:
    with Echo().embedder() as embedder:
        outputs = embedder.embed([[1], "", " \n", [], [1] * 41, [100], "7"])
    assert [None, "refused", "refused", "refused", "refused", "refused", None] == [
        None if output.finish_reason == "computed" else output.finish_reason for output in outputs
    ]
    errors = [output.error or "" for output in outputs]
    assert ["the text is empty"] * 2 == errors[1:3]
    assert "at most 40" in errors[4]
    assert "100 is not a token id" in errors[5]
    assert [(1.0, 0.0, 1.0), (7.0, 0.0, 1.0)] == [output.embedding for output in outputs if output.embedding]


@pytest.mark.parametrize("wrong", [5, None, object(), b"ab", [[1]], Prompt(encoder=[1])])
def test_what_is_no_text_is_refused_alone(wrong: Any) -> None:
    with Echo().embedder() as embedder:
        first, refused, last = embedder.embed([[1], wrong, [7]])
    assert ("refused", ()) == (refused.finish_reason, refused.token_ids)
    assert [(1.0, 0.0, 1.0), (7.0, 0.0, 1.0)] == [first.embedding, last.embedding]


def test_a_text_whose_embedding_is_not_numbers_fails_alone() -> None:
    with Echo().embedder() as embedder:
        good, bad = embedder.embed([[1, 2], [3, 99]])
    assert ("computed", (1.5, 0.5, 1.0)) == (good.finish_reason, good.embedding)
    assert "error" == bad.finish_reason
    assert "not numbers" in (bad.error or "")


def test_a_step_that_fails_ends_its_texts_and_leaks_nothing() -> None:
    model = Echo("full_attention")
    with model.embedder(max_num_seqs=2) as embedder:
        ids = [embedder.add_request([each] * 9) for each in (1, 2, 3)]
        model.fails = True
        with pytest.raises(RuntimeError, match="out of order"):
            embedder.step()
        model.fails = False
        ended = {output.request_id: output.finish_reason for output in embedder.step()}
        assert {ids[0]: "error", ids[1]: "error", ids[2]: "computed"} == ended
        assert 0 == held_pages(embedder)


def test_an_aborted_text_gives_its_blocks_back() -> None:
    with Echo("full_attention").embedder(max_num_batched_tokens=4) as embedder:
        request_id = embedder.add_request([1] * 9)
        assert [] == embedder.step()
        embedder.abort(request_id)
        (output,) = embedder.step()
        assert ("aborted", None) == (output.finish_reason, output.embedding)
        assert 0 == held_pages(embedder)


def test_embedding_that_is_cut_short_leaves_nothing_behind() -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with Echo("full_attention").embedder(max_num_batched_tokens=4) as embedder:
        with pytest.raises(KeyboardInterrupt):
            embedder.embed([[1] * 9, [2] * 9], on_progress=stop)
        assert not embedder.has_unfinished
        assert 0 == held_pages(embedder)


def test_an_id_that_is_taken_is_refused() -> None:
    with Echo().embedder() as embedder:
        embedder.add_request([1], "mine")
        with pytest.raises(RequestError, match="'mine' is in the engine already"):
            embedder.add_request([2], "mine")


def test_a_model_that_does_not_generate_is_refused_by_the_engine() -> None:
    model = Echo()
    registry, stack = load_plugins().registry, Stack()
    with pytest.raises(ModelError, match=r"echo does not generate text.*`kvframe embed`"):
        Engine(model, Setup.of(model.description, stack, registry, dtype="float32"))
    assert not model.is_attached


def test_a_model_without_hidden_states_is_refused_by_the_embedder() -> None:
    class HeadOnly(Echo):
        def without_head(self) -> LoadedModel:
            return LoadedModel.without_head(self)

    with pytest.raises(ModelError, match="echo gives logits only"):
        HeadOnly("full_attention").embedder()

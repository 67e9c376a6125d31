"""Encoders that do more than BERT: windows, neighbours that are mixed, attention that no layer describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers import apart, attached, probe
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.testing import spread_weights
from transformers import AutoModel, AutoModelForSeq2SeqLM

from kvframe import Embedder, Engine, Prompt, SamplingParams, Stack
from kvframe.contract import ModelError
from tests.covering import keep
from tests.models.census.compare import Verdict, compare
from tests.models.census.shrink import tiny_config
from tests.models.serving import ids

STACK = Stack.from_mapping({"cache": {"memory": "2MiB"}, "limits": {"max_num_batched_tokens": 64}})
WINDOWS = ("modernbert", "neomme", "ultrabert", "t5gemma")
MIXING = ("mobilebert", "convbert")
OTHERS = ("ibert", "layoutlm", "nystromformer", "xmod")
OWN = ("deberta-v2", "deberta", "longformer", "big_bird", "fnet", "mra", "yoso")
OWN_CODE = "its own code computes the texts of a step one after the other, on no backend"


@pytest.mark.parametrize("family", [*keep(WINDOWS, "modernbert"), *MIXING, *keep(OTHERS, "ibert", "nystromformer")])
def test_its_embeddings_are_those_of_its_own_forward(family: str) -> None:
    assert Verdict("equal") == compare("encoders", family)


@pytest.mark.parametrize("family", keep(OWN, "deberta-v2", "longformer"))
def test_an_encoder_that_no_layer_describes_is_computed_by_its_own_code(family: str) -> None:
    assert Verdict("equal", OWN_CODE) == compare("encoders", family)


def saved(path: Path, family: str, **overrides: Any) -> Any:
    """Save a tiny random encoder, and return it."""
    torch.manual_seed(0)
    with quiet():
        model: Any = AutoModel.from_config(tiny_config(family, **overrides), dtype=torch.float32).eval()
        spread_weights(model, 8.0)
        model.save_pretrained(path)
    return model


def test_embedding_gemma_has_windows_in_both_directions(tmp_path: Path) -> None:
    plain = saved(tmp_path, "gemma3_text", use_bidirectional_attention=True)
    texts = [ids(1, 3), ids(2, 40), ids(3, 10)]
    with torch.inference_mode():
        expected = [plain(torch.tensor([text]), use_cache=False).last_hidden_state[0].mean(0) for text in texts]
    with Embedder.from_pretrained(tmp_path, stack=STACK, pooling="mean", normalize=False) as embedder:
        embeddings = torch.tensor([output.embedding for output in embedder.embed(texts)])
        sizes = {(layer.options.get("window"), layer.kind) for layer in embedder.model.description.layers}
    torch.testing.assert_close(embeddings, torch.stack(expected), rtol=1e-4, atol=1e-4)
    assert {(5, "encoder_only"), (None, "encoder_only")} == sizes


def test_big_bird_attends_sparsely_in_a_long_text_after_a_short_one(tmp_path: Path) -> None:
    """Its own code attends to all tokens of every text after a short one."""
    saved(tmp_path, "big_bird", block_size=4)
    texts, expected = [ids(1, 5), ids(2, 60)], []
    for text in texts:
        plain = AutoModel.from_pretrained(tmp_path).eval()
        with torch.inference_mode():
            expected.append(plain(torch.tensor([text])).last_hidden_state[0].mean(0))
    with Embedder.from_pretrained(tmp_path, stack=STACK, pooling="mean", normalize=False) as embedder:
        embeddings = torch.tensor([output.embedding for output in embedder.embed(texts)])
    torch.testing.assert_close(embeddings, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_the_encoder_of_big_bird_pegasus_chooses_its_attention_by_each_text(tmp_path: Path) -> None:
    config = tiny_config("bigbird_pegasus", block_size=4)
    with quiet():
        AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, stack=STACK) as engine:
        encoder, kinds = engine.model.model.get_encoder(), []
        encoder.register_forward_hook(lambda *_: kinds.append(encoder.attention_type))
        for text in (ids(1, 5), ids(2, 60)):
            engine.generate([Prompt(encoder=text, decoder=[2])], SamplingParams(max_new_tokens=1))
    assert ["original_full", "block_sparse"] == kinds


@pytest.mark.parametrize("family", MIXING)
def test_neighbours_that_are_mixed_across_texts_are_found_by_the_self_check(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, family)
    monkeypatch.setattr(probe, "find_apart", lambda *_: {})
    monkeypatch.setattr(attached, "unfolds", lambda _: False)
    with pytest.raises(ModelError, match="gives other hidden states in a packed batch than alone"):
        Embedder.from_pretrained(tmp_path, stack=STACK)


@pytest.mark.parametrize(("family", "expected"), [("mobilebert", {"MobileBertEmbeddings"}), ("bert", set())])
def test_only_what_mixes_tokens_runs_apart(family: str, expected: set[str], tmp_path: Path) -> None:
    saved(tmp_path, family)
    with Embedder.from_pretrained(tmp_path, stack=STACK) as embedder:
        loaded: Any = embedder.model
        assert expected == {type(module).__name__ for module in loaded._mode.apart}


def test_a_model_with_parts_that_mix_tokens_is_not_compiled(tmp_path: Path) -> None:
    saved(tmp_path, "mobilebert")
    stack = Stack.from_mapping({"cache": {"memory": "2MiB"}, "model": {"compile": True}})
    with pytest.raises(ModelError, match="has parts that mix tokens outside of attention"):
        Embedder.from_pretrained(tmp_path, stack=stack)


def test_a_module_that_mixes_tokens_is_told_by_its_output() -> None:
    class Sums(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alone, self.mixing = torch.nn.Linear(3, 3), torch.nn.Conv1d(3, 3, 3, padding=1)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            summed: torch.Tensor = self.alone(rows) + self.mixing(rows.mT).mT
            return summed

    sums = Sums()
    with torch.inference_mode():
        mixers = apart.find_apart(sums, (), lambda length: sums(torch.randn(1, length, 3)), 1e-4)
    assert [sums.mixing] == list(mixers)


# --- by its own code --------------------------------------------------------------------------------------------------


def test_it_has_no_layers_and_says_why_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = saved(tmp_path / "own-deberta", "deberta-v2")
    with caplog.at_level("WARNING", "kvframe"):
        assert () == TransformersAdapter().describe(tmp_path / "own-deberta").layers
        with Embedder.from_pretrained(tmp_path / "own-deberta", stack=STACK, pooling="cls") as embedder:
            texts = [ids(1, 3), ids(2, 30), ids(3, 9), ids(4, 1)]
            outputs = embedder.embed(texts)
            stats = embedder.stats()
    assert 1 == sum(OWN_CODE in record.getMessage() for record in caplog.records)
    assert (0, 43) == (stats.cache_bytes, stats.computed_tokens)
    with torch.inference_mode():
        expected = [plain(torch.tensor([text])).last_hidden_state[0, 0] for text in texts]
    torch.testing.assert_close(torch.tensor([output.embedding for output in outputs]), torch.stack(expected))


def test_texts_are_never_divided_between_steps(tmp_path: Path) -> None:
    plain = saved(tmp_path, "deberta-v2")
    texts = [ids(1, 40), ids(2, 40), ids(3, 50)]
    with torch.inference_mode():
        expected = [plain(torch.tensor([text])).last_hidden_state[0].mean(0) for text in texts]
    stack = Stack.from_mapping({"cache": {"memory": "2MiB"}, "limits": {"max_num_batched_tokens": 48}})
    with Embedder.from_pretrained(tmp_path, stack=stack, pooling="mean", normalize=False) as embedder:
        *fitting, too_long = embedder.embed(texts)
    assert too_long.error is not None
    assert "computes a prompt in one step, which has at most 48" in too_long.error
    torch.testing.assert_close(torch.tensor([output.embedding for output in fitting]), torch.stack(expected[:2]))


def test_a_model_in_memory_serves_one_engine_at_a_time_and_trains_between_steps(tmp_path: Path) -> None:
    plain = saved(tmp_path, "deberta-v2").train()
    with Embedder.from_model(plain, stack=STACK) as embedder:
        first = embedder.embed([ids(1, 5)])
        assert plain.training
        with pytest.raises(ModelError, match="serves another engine already"):
            Embedder.from_model(plain, stack=STACK)
        assert first[0].embedding == embedder.embed([ids(1, 5)])[0].embedding
    with Embedder.from_model(plain, stack=STACK) as embedder:
        assert first[0].embedding == embedder.embed([ids(1, 5)])[0].embedding


def test_it_is_not_compiled(tmp_path: Path) -> None:
    saved(tmp_path, "deberta-v2")
    stack = Stack.from_mapping({"cache": {"memory": "2MiB"}, "model": {"compile": True}})
    with pytest.raises(ModelError, match="computes each text alone"):
        Embedder.from_pretrained(tmp_path, stack=stack)

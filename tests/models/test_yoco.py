"""The example of a new architecture: its tokens equal its dense forward's, with prefill skipping on and off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvframe import Engine, SamplingParams, Stack
from kvframe.contract.errors import ModelError
from tests.covering import cover_pairs, few
from tests.models.serving import ids
from tests.programs import run_program
from tests.stacks import tables_of

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "yoco"
NUM_NEW_TOKENS = 8
GREEDY = SamplingParams(max_new_tokens=NUM_NEW_TOKENS)
SKIPPING = pytest.mark.parametrize("skipping", [None, "decode_only"], ids=["off", "on"])


# Around the window of 16 and the block size of 8; the last three begin with the same 40 tokens.
PROMPTS = (ids(1, 1), ids(2, 15), ids(3, 17), ids(4, 100), ids(5, 40), ids(5, 40) + ids(6, 3), ids(5, 40) + ids(7, 30))


@attrs.frozen
class Example:
    """The example's modules, a checkpoint, and the tokens that its dense forward gives after each prompt."""

    model: ModuleType
    adapter: ModuleType
    plugin: ModuleType
    dense: Any
    path: Path
    expected: list[list[int]]

    @contextmanager
    def engine(self, **options: Any) -> Iterator[Engine]:
        """Return an engine; its options are those of the stack's tables, and ``backend`` is for every layer."""
        extra = {name: options.pop(name) for name in ("skip_policy",) if name in options}
        rules = [{"layers": "*", "backend": options.pop("backend", "auto")}]
        skipping = options.pop("skipping", None)
        if skipping is not None:
            options["prefill_skipping"] = skipping
        usual = {"memory": "2MiB", "block_size": 8, "self_check": False}
        stack = Stack.from_mapping({**tables_of(**{**usual, **options}), "rules": rules})
        with Engine.from_pretrained(
            self.path, stack=stack, plugins=[self.plugin], poison_freed=True, **extra
        ) as engine:
            yield engine


@pytest.fixture(scope="module")
def yoco(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    sys.path.insert(0, str(FOLDER))
    try:
        import yoco_adapter
        import yoco_model
        import yoco_plugin

        path = tmp_path_factory.mktemp("models") / "yoco"
        dense = yoco_model.make_random(yoco_model.YocoConfig())
        yoco_adapter.save_checkpoint(dense, path)
        expected = [yoco_model.generate_densely(dense, prompt, NUM_NEW_TOKENS) for prompt in PROMPTS]
        yield Example(yoco_model, yoco_adapter, yoco_plugin, dense, path, expected)
    finally:
        sys.path.remove(str(FOLDER))


def served(engine: Engine, prompts: Any = PROMPTS) -> list[list[int]]:
    return [list(output.token_ids) for output in engine.generate(prompts, GREEDY)]


def count_rows(engine: Engine) -> list[int]:
    """Return a list to which each forward adds the rows of the cross-decoder's last layer."""
    rows: list[int] = []
    model: Any = engine.model
    model.model.cross_decoder[-1].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    return rows


# --- the model --------------------------------------------------------------------------------------------------------


def test_the_cross_decoder_has_nothing_that_makes_keys_or_values(yoco: Example) -> None:
    names = {name.split(".")[-2] for name, _ in yoco.dense.cross_decoder.named_parameters()}
    assert {"query", "output", "gate", "up", "down", "attention_norm", "feed_forward_norm"} == names


def test_random_weights_attend_far_from_uniformly(yoco: Example) -> None:
    narrower = yoco.model.make_random(attrs.evolve(yoco.dense.config, window=15))
    assert yoco.model.generate_densely(narrower, PROMPTS[3], NUM_NEW_TOKENS) != yoco.expected[3]


def test_a_seed_gives_the_same_weights(yoco: Example) -> None:
    again = yoco.model.make_random(yoco.dense.config)
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), yoco.dense.parameters(), strict=True)
    )


# --- its description --------------------------------------------------------------------------------------------------


def test_one_layer_keeps_the_only_global_cache(yoco: Example) -> None:
    with yoco.engine() as engine:
        groups = [(group.spec.kind, len(group.layers)) for group in engine.plan.groups]
        assert [("sliding_window", 3), ("full_attention", 1)] == groups
        assert {f"cross_decoder.{i}.attention": "self_decoder.3.attention" for i in range(4)} == engine.grouping.follows


def test_rows_are_left_out_at_the_start_of_the_cross_decoder_only(yoco: Example) -> None:
    model = yoco.adapter.YocoModel(yoco.dense, "yoco")
    cross = [f"cross_decoder.{i}.attention" for i in range(4)]
    assert model.can_skip(cross)
    assert not model.can_skip(cross[1:])


@SKIPPING
def test_the_self_check_passes(yoco: Example, skipping: str | None) -> None:
    with yoco.engine(skipping=skipping, self_check=True, max_model_len=30):
        pass


@SKIPPING
def test_the_self_check_sees_an_error_in_the_last_rows(
    yoco: Example, skipping: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = yoco.model.Yoco.forward

    def shifted(self: Any, *inputs: Any, cross_rows: Any = None, **rows: Any) -> Any:
        return run(self, *inputs, cross_rows=None if cross_rows is None else (cross_rows - 1).clamp(min=0), **rows)

    monkeypatch.setattr(yoco.model.Yoco, "forward", shifted)
    if skipping is None:
        with yoco.engine(self_check=True):
            return
    with (
        pytest.raises(ModelError, match="other logits in a packed batch"),
        yoco.engine(skipping=skipping, self_check=True),
    ):
        pass


def test_closing_gives_the_model_its_dense_attention_back(yoco: Example) -> None:
    with yoco.engine(skipping="decode_only") as engine:
        model: Any = engine.model
        assert served(engine, PROMPTS[:3]) == yoco.expected[:3]
    assert yoco.expected[3] == yoco.model.generate_densely(model.model, PROMPTS[3], NUM_NEW_TOKENS)


def test_a_model_serves_one_engine_at_a_time(yoco: Example) -> None:
    with yoco.engine() as engine, pytest.raises(ModelError, match="serves another engine already"):
        engine.model.attach({})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", '{"architecture": "other"}', '{"model_type": "llama"}'])
def test_the_config_of_another_model_is_not_recognised(yoco: Example, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert not yoco.adapter.YocoAdapter().recognises(tmp_path)
    assert yoco.adapter.YocoAdapter().recognises(yoco.path)


def test_missing_weights_are_one_sentence(yoco: Example, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((yoco.path / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ModelError, match=r"the weights in .* cannot be read"):
        yoco.adapter.YocoAdapter().load(tmp_path, device="cpu", dtype="float32")


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skipping", "hybrid", "backend", "max_num_batched_tokens"),
    few(3, cover_pairs((None, "decode_only"), (True, False), ("torch", "torch_reference"), (2048, 19))),
)
def test_tokens_equal_the_dense_forward(
    yoco: Example, skipping: str | None, hybrid: bool, backend: str, max_num_batched_tokens: int
) -> None:
    options = {"hybrid": hybrid, "backend": backend, "max_num_batched_tokens": max_num_batched_tokens}
    with yoco.engine(skipping=skipping, **options) as engine:
        assert yoco.expected == served(engine)


@SKIPPING
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "all_full"])
def test_tokens_after_a_cached_prefix_equal_the_dense_forward(
    yoco: Example, skipping: str | None, hybrid: bool
) -> None:
    with yoco.engine(skipping=skipping, hybrid=hybrid, prefix_caching=True, max_num_batched_tokens=32) as engine:
        assert yoco.expected[:5] == served(engine, PROMPTS[:5])
        before = engine.stats().cached_prompt_tokens
        assert yoco.expected[5:] == served(engine, PROMPTS[5:])
        # The 5 blocks of the common 40 tokens, once for each of the two prompts.
        assert 2 * 40 == engine.stats().cached_prompt_tokens - before


@pytest.fixture(scope="module")
def long_answers(yoco: Example) -> list[list[int]]:
    """The 30 tokens that the dense forward generates after each of eight prompts."""
    return [yoco.model.generate_densely(yoco.dense, ids(start, 20), 30) for start in range(8)]


@SKIPPING
def test_tokens_after_preemption_equal_the_dense_forward(
    yoco: Example, long_answers: list[list[int]], skipping: str | None
) -> None:
    prompts = [ids(start, 20) for start in range(8)]
    with yoco.engine(
        skipping=skipping, memory="96KiB", max_model_len=64, max_num_batched_tokens=32, prefix_caching=False
    ) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=30))
        assert long_answers == [list(output.token_ids) for output in outputs]
        assert engine.stats().preemptions > 0


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6), budget=st.integers(6, 64))
def test_skipping_changes_no_token_of_any_batch(yoco: Example, lengths: list[int], budget: int) -> None:
    prompts = [ids(index, length) for index, length in enumerate(lengths)]
    tokens = []
    for skipping in (None, "decode_only"):
        with yoco.engine(skipping=skipping, max_num_batched_tokens=budget) as engine:
            tokens.append(served(engine, prompts))
    assert tokens[0] == tokens[1]


def test_log_probabilities_of_a_prompt_are_those_of_the_dense_forward(yoco: Example) -> None:
    prompt = PROMPTS[3]
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    with torch.inference_mode():
        logits = yoco.dense(torch.tensor(prompt), torch.arange(len(prompt)))
    expected = logits.log_softmax(-1)[torch.arange(len(prompt) - 1), prompt[1:]].tolist()
    with yoco.engine(skipping="decode_only", max_num_batched_tokens=32) as engine:
        logprobs = engine.generate([prompt, PROMPTS[2]], [params, GREEDY])[0].prompt_logprobs
    assert logprobs is not None
    assert logprobs[0] is None
    assert expected == pytest.approx(logprobs[1:], abs=1e-4)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_the_cross_decoder_computes_the_generating_rows_only(yoco: Example) -> None:
    with yoco.engine(skipping="decode_only", prefix_caching=False) as engine:
        rows = count_rows(engine)
        served(engine)
        assert [len(PROMPTS)] * NUM_NEW_TOKENS == rows


def test_without_skipping_it_computes_every_row(yoco: Example) -> None:
    with yoco.engine(prefix_caching=False) as engine:
        rows = count_rows(engine)
        served(engine)
        assert [sum(map(len, PROMPTS)), *[len(PROMPTS)] * (NUM_NEW_TOKENS - 1)] == rows


def test_a_step_that_completes_no_prompt_computes_one_padded_row(yoco: Example) -> None:
    with yoco.engine(skipping="decode_only", max_num_batched_tokens=40, prefix_caching=False) as engine:
        rows = count_rows(engine)
        assert [yoco.expected[3][:1]] == [
            list(output.token_ids) for output in engine.generate([PROMPTS[3]], SamplingParams(max_new_tokens=1))
        ]
        assert [1, 1, 1] == rows


def test_a_policy_can_leave_skipping_off(yoco: Example) -> None:
    def long_steps_only(batch: Any) -> bool:
        return bool(batch.query_lens.sum() >= 64)

    options = {"skipping": "decode_only", "prefix_caching": False, "skip_policy": long_steps_only}
    with yoco.engine(**options) as engine:
        rows = count_rows(engine)
        assert yoco.expected[2:4] == [*served(engine, [PROMPTS[2]]), *served(engine, [PROMPTS[3]])]
        decodes = [1] * (NUM_NEW_TOKENS - 1)
        assert [len(PROMPTS[2]), *decodes, 1, *decodes] == rows


def test_the_example_runs_and_shows_the_skipped_rows() -> None:
    process = run_program(str(FOLDER / "run_yoco.py"))
    assert process.returncode == 0, process.stderr
    assert [
        "prefill skipping off: 555 rows in a layer of the self-decoder, 555 in one of the cross-decoder",
        "prefill skipping on: 555 rows in a layer of the self-decoder, 66 in one of the cross-decoder",
    ] == [line for line in process.stdout.splitlines() if line.startswith("prefill skipping")]
    assert 2 == process.stdout.count("4 of 4 requests")

"""Steps in which layers skip prompt tokens: when they do, how a policy prevents it, and that no logits change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from kvframe_engine.core import STEP_FAILED
from kvframe_engine.requests.request import SamplingParams

from kvframe import Engine, RequestOutput, Step
from kvframe.attention.batch_metadata import StepBatch
from kvframe.contract.metadata import NO_EXTENSIONS, Axis, CommonAttentionMetadata, Extension
from tests.covering import keep
from tests.engine.scripted_model import ScriptedModel
from tests.models.serving import GREEDY, PROMPTS, TinyModel, Tokens, held_pages
from tests.support.engines import manager_of, runner_of

SKIPPING: dict[str, Any] = {"prefill_skipping": "decode_only", "max_num_batched_tokens": 24}
LONG = 3  # the index in PROMPTS: 64 tokens, so steps of 24, 24 and 16


@pytest.fixture(scope="module")
def model(models: Callable[[str], TinyModel]) -> TinyModel:
    """Six layers; the last two keep no cache of their own."""
    return models("gemma3n_text")


@pytest.fixture(scope="module")
def reference(references: Callable[[str], Tokens]) -> Tokens:
    return references("gemma3n_text")


def serve(model: TinyModel, policy: Callable[[StepBatch], bool] | None = None, **options: Any) -> Engine:
    return model.engine(skip_policy=policy, **{**SKIPPING, **options})


@contextmanager
def rows_of(model: TinyModel, layer: int) -> Iterator[list[int]]:
    """Record the number of rows that a layer computes in each call."""
    loaded: Any = model.loaded
    seen: list[int] = []

    def note(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        seen.append(output[0].shape[1])

    handle = loaded.model.model.layers[layer].self_attn.register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


# --- the policy -------------------------------------------------------------------------------------------------------


def test_without_a_policy_a_step_computes_in_its_last_layers_what_generates(
    model: TinyModel, reference: list[tuple[int, ...]]
) -> None:
    with serve(model) as engine, rows_of(model, 3) as kept, rows_of(model, 5) as skipped:
        (output,) = engine.generate([PROMPTS[LONG]], attrs.evolve(GREEDY, max_new_tokens=3))
    assert reference[LONG][:3] == output.token_ids
    assert [24, 24, 16, 1, 1] == kept
    # If no token generates, a step computes one row, which is not used.
    assert [1, 1, 1, 1, 1] == skipped


def test_a_policy_is_asked_where_a_token_could_be_skipped_and_its_no_computes_all(
    model: TinyModel, reference: list[tuple[int, ...]]
) -> None:
    asked: list[tuple[list[int], list[int], list[int]]] = []

    def policy(batch: StepBatch) -> bool:
        asked.append((batch.num_computed.tolist(), batch.query_lens.tolist(), batch.generating_indices.tolist()))
        return len(asked) == 2

    with serve(model, policy) as engine, rows_of(model, 5) as skipped:
        (output,) = engine.generate([PROMPTS[LONG]], attrs.evolve(GREEDY, max_new_tokens=3))
    assert reference[LONG][:3] == output.token_ids
    assert [([0], [24], []), ([24], [24], []), ([48], [16], [15])] == asked
    assert [24, 1, 16, 1, 1] == skipped


@pytest.mark.parametrize(
    "options",
    keep(
        [{}, {"hybrid": False}, {"block_size": 4}, {"max_num_batched_tokens": 7}],
        {"block_size": 4},
        {"max_num_batched_tokens": 7},
    ),
    ids=str,
)
def test_tokens_are_equal_whatever_the_policy_says(
    model: TinyModel, reference: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    num_asked = 0

    def every_other(_: StepBatch) -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked % 2 == 0

    with serve(model, every_other, **options) as engine:
        assert reference == [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    assert num_asked > 2


def test_where_no_layer_skips_no_policy_is_asked(model: TinyModel) -> None:
    def never(_: StepBatch) -> bool:
        raise AssertionError("there is nothing to ask")

    with serve(model, never, prefill_skipping=None) as engine:
        (output,) = engine.generate([PROMPTS[LONG]], attrs.evolve(GREEDY, max_new_tokens=1))
    assert "length" == output.finish_reason


def test_a_policy_that_raises_fails_its_step_and_the_others_go_on(
    model: TinyModel, reference: list[tuple[int, ...]]
) -> None:
    def policy(batch: StepBatch) -> bool:
        if batch.num_computed[0] == 24:
            raise ValueError("no opinion")
        return True

    with serve(model, policy, max_num_seqs=1) as engine:
        engine.add_request(PROMPTS[LONG], GREEDY, "failing")
        engine.add_request(PROMPTS[2], GREEDY, "waiting")
        engine.step()
        with pytest.raises(ValueError, match="no opinion"):
            engine.step()
        assert 0 == held_pages(engine)
        outputs: dict[str, RequestOutput] = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
    assert ("error", STEP_FAILED) == (
        outputs["failing"].finish_reason,
        outputs["failing"].error,
    )
    assert reference[2] == outputs["waiting"].token_ids


def test_a_request_that_wants_log_probabilities_computes_all_its_rows_alone(
    model: TinyModel, reference: list[tuple[int, ...]]
) -> None:
    indices = (1, 2)  # 9 and 17 tokens
    params = [attrs.evolve(GREEDY, prompt_logprobs=wanted) for wanted in (True, False)]
    prompts = [PROMPTS[index] for index in indices]
    with serve(model, max_num_batched_tokens=64) as engine, rows_of(model, 5) as skipped:
        outputs = engine.generate(prompts, params)
    assert [reference[index] for index in indices] == [output.token_ids for output in outputs]
    assert [9 + 1, 2, 2] == skipped[:3]
    with serve(model, prefill_skipping=None, max_num_batched_tokens=64) as engine:
        plain = engine.generate(prompts, params)
    found, expected = outputs[0].prompt_logprobs, plain[0].prompt_logprobs
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(torch.tensor(found[1:]), torch.tensor(expected[1:]))


# --- a packed batch, row by row ---------------------------------------------------------------------------------------


@attrs.frozen
class Rows:
    """Runs packed batches of ``PROMPTS`` through an engine's runner, and has the plain model's logits."""

    engine: Engine
    plain: list[torch.Tensor]

    @classmethod
    @contextmanager
    def serve(cls, model: TinyModel, policy: Callable[[StepBatch], bool] | None = None) -> Iterator[Rows]:
        loaded: Any = model.loaded
        with torch.inference_mode():
            plain = [loaded.model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
        with serve(model, policy, max_num_batched_tokens=512) as engine:
            for index, prompt in enumerate(PROMPTS):
                manager_of(engine).start(str(index), prompt, use_prefix=False)
                assert manager_of(engine).extend(str(index), len(prompt))
                runner_of(engine).tokens[manager_of(engine).row(str(index)), : len(prompt)] = prompt
            yield cls(engine, plain)

    def run(
        self,
        chunks: Sequence[tuple[int, int, int]],
        wanted: Sequence[int],
        extensions: Mapping[str, Extension] = NO_EXTENSIONS,
    ) -> None:
        """Compute tokens ``[start, stop)`` of prompts, and check the logits of the wanted packed tokens.

        Args:
            chunks: Prompt, start and stop.
            wanted: The packed tokens.
            extensions: Further inputs of the step.
        """
        rows = [manager_of(self.engine).row(str(index)) for index, _, _ in chunks]
        lens = [stop - start for _, start, stop in chunks]
        found = runner_of(self.engine).forward(
            StepBatch(
                rows=np.array(rows),
                num_computed=np.array([start for _, start, _ in chunks]),
                query_lens=np.array(lens),
                generating_indices=np.array(wanted, dtype=np.int64),
                extensions=extensions,
            )
        )
        expected = torch.cat([self.plain[index][start:stop] for index, start, stop in chunks])[list(wanted)]
        torch.testing.assert_close(found, expected)


def test_draft_tokens_have_their_logits_beside_prompts_that_are_skipped(model: TinyModel) -> None:
    with Rows.serve(model) as rows, rows_of(model, 5) as skipped:
        rows.run([(3, 0, 40), (5, 0, 20)], [])
        # A token with 3 drafts, a chunk that does not end its prompt, and one that does.
        rows.run([(3, 40, 44), (5, 20, 30), (2, 0, 17)], [0, 1, 2, 3, 30])
        # Two of the drafts were wrong.
        rows.run([(3, 42, 46), (5, 30, 34)], range(8))
    assert [1, 5, 8] == skipped


def test_further_inputs_of_a_step_reach_the_batch(model: TinyModel) -> None:
    seen: list[list[int]] = []

    def policy(batch: StepBatch) -> bool:
        seen.append(batch.extensions["lengths"].values.tolist())
        return True

    lens = Extension(values=torch.tensor([0, 2], dtype=torch.int32), axis=Axis.REQUEST, optional=True)
    with Rows.serve(model, policy) as rows:
        rows.run([(3, 0, 40), (5, 0, 20)], [59], {"lengths": lens})
    assert [[0, 2]] == seen


def test_tokens_before_others_of_their_request_are_no_reason_for_other_logits(model: TinyModel) -> None:
    with Rows.serve(model) as rows, rows_of(model, 5) as skipped:
        rows.run([(3, 0, 10), (2, 0, 5)], [3, 9, 14])
        rows.run([(3, 10, 20), (2, 5, 10)], [8, 9, 14])
    assert [15, 3] == skipped


def test_a_step_whose_logits_nobody_wants_has_none(model: TinyModel) -> None:
    with Rows.serve(model) as rows:
        rows.run([(3, 0, 10), (2, 0, 5)], [])


# --- padding ----------------------------------------------------------------------------------------------------------


class PaddedLayers:
    """Replaces the layers; the last ones run at a size that is always two rows too large."""

    skipped = ("layer",)
    layers: Any
    kept_rows: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layers, name)

    def begin_step(
        self, metadata: Sequence[CommonAttentionMetadata], *, inputs: tuple[torch.Tensor, ...], **_: Any
    ) -> Step:
        rows = metadata[0].generating_indices
        self.kept_rows = torch.cat([rows, rows[-1:], rows[-1:]])
        return Step(groups=(), inputs=inputs, kept_rows=self.kept_rows, states=())


class PaddedModel(ScriptedModel):
    """Returns logits for the rows that such layers compute."""

    def __init__(self, layers: PaddedLayers, script: str) -> None:
        super().__init__(script)
        self.layers = layers

    def self_check(self, run_packed: Any) -> None:
        return

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, positions, self.layers.kept_rows)


@pytest.mark.parametrize("skips", [True, False])
def test_padded_rows_are_nobodys_logits(skips: bool) -> None:
    layers: Any = PaddedLayers()
    with PaddedModel(layers, "the quick brown").engine(max_num_batched_tokens=5) as engine:
        layers.layers, runner_of(engine)._layers = runner_of(engine)._layers, layers
        runner_of(engine)._skip_policy = lambda _: skips
        outputs = engine.generate(["the", "the quick"], SamplingParams(max_new_tokens=4))
    assert [" qui", " bro"] == [output.text for output in outputs]

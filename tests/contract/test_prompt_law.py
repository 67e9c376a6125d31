"""The law of the prompt: what a spec's live ranges for prompts of one length may differ in."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvframe.contract import (
    AttentionMask,
    AttentionSpec,
    Capabilities,
    KVCacheSpec,
    LayerSpec,
    MaskFunction,
    QuerySpec,
    SpecError,
    TokenRange,
)
from kvframe.planning.answers import Answers, spec_for_prompt
from kvframe.planning.spec_check import check_spec_at_set_up
from kvframe.testing.laws import ConformanceError, check_spec
from tests.cache.plans import MaskedSpec, by_prompt, masked, ranged, with_prompt

SIZES: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 4}


@attrs.frozen(kw_only=True)
class Wrong(AttentionSpec):
    """A window, and a spec for prompts that keeps no law."""

    kind = "wrong"
    made: KVCacheSpec

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((max(0, n - 7), n),) if n else ()

    def for_prompt(self, num_prompt_tokens: int) -> KVCacheSpec:
        return self.made


@attrs.frozen(kw_only=True)
class Endless(MaskedSpec):
    """A mask that keeps prompts, of a type without ``for_prompt``."""

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(window=4, keeps_prompt=True)

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((0, n),) if n else ()


@pytest.mark.parametrize(
    "spec", [by_prompt(window=3), by_prompt(window=2, parts_kept=1, prompt_window=6), with_prompt()]
)
def test_types_that_keep_it_pass(spec: KVCacheSpec) -> None:
    assert spec.depends_on_prompt
    check_spec(spec, 40)
    check_spec_at_set_up(spec, 100, 8)


@pytest.mark.parametrize(
    "made",
    [
        ranged(window=3),  # less while the prompt is computed
        ranged(window=20),  # more than the type
        by_prompt(window=3),  # depends on prompts itself
        attrs.evolve(ranged(window=8), block_size=8),
    ],
)
def test_a_spec_that_breaks_it_is_refused(made: KVCacheSpec) -> None:
    spec = Wrong(**SIZES, made=made)
    with pytest.raises(ConformanceError):
        check_spec(spec, 40)
    with pytest.raises(SpecError, match=r"for_prompt|for a prompt"):
        check_spec_at_set_up(spec, 100, 8)
    with pytest.raises(SpecError):
        [Answers(spec).for_prompt(30).live_ranges(n) for n in range(60)]


def test_a_mask_that_keeps_prompts_needs_for_prompt() -> None:
    spec = Endless(**SIZES)
    with pytest.raises(ConformanceError, match="no for_prompt"):
        check_spec(spec, 20)
    with pytest.raises(SpecError, match="has no for_prompt"):
        check_spec_at_set_up(spec, 50, 8)
    with pytest.raises(SpecError, match="leave keeps_prompt out"):
        AttentionMask(keeps_prompt=True)


@attrs.frozen(kw_only=True)
class SparseByPrompt(AttentionSpec):
    """Every second token, and the whole prompt."""

    kind = "sparse_by_prompt"
    num_prompt: int = 1 << 30
    is_sparse = True

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((0, n),) if n else ()

    @property
    def mask_function(self) -> MaskFunction:
        return lambda query, key: (key <= query) & ((key < self.num_prompt) | ((query - key) % 2 == 0))

    def for_prompt(self, num_prompt_tokens: int) -> KVCacheSpec:
        return attrs.evolve(self, num_prompt=num_prompt_tokens)


def test_a_sparse_type_that_depends_on_the_prompt_needs_live_ranges() -> None:
    def codes(*masks: str) -> list[str]:
        known = Capabilities(devices={"cpu"}, dtypes={"float32"}, masks=masks)
        return [each.code for each in known.refusals(layer, "cpu")]

    query = QuerySpec(num_heads=1, head_size=4, scale=1.0)
    layer = LayerSpec(name="layer", spec=SparseByPrompt(**SIZES, dtype="float32"), query=query)
    assert [] == codes("sparse", "prompt", "live_range")
    # A mask function knows positions only.
    assert ["mask_live_range"] == codes("sparse", "prompt", "mask_function")
    assert ["mask_prompt"] == codes("sparse", "live_range")


def test_other_types_are_their_own_for_every_prompt() -> None:
    spec = masked(window=4)
    assert not spec.depends_on_prompt
    assert spec is spec.for_prompt(5) is spec_for_prompt(spec, 5)
    answers = Answers(spec)
    assert answers is answers.for_prompt(5)

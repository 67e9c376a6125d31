"""Types that keep a part of each prompt: what they may not be, and where they are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_entries import TokenEntriesSpec, UnfinishedGroupSpec
from kvframe_testing.kept_tokens import check_kept
from kvframe_testing.laws import ConformanceError

from kvframe import FullAttentionSpec, KVCacheStorage, Layers, Stack, group_layers, load_plugins, plan_cache
from kvframe.attention.kept_tokens import KeptTokens
from kvframe.contract import AttentionMask, KVCacheSpec, LayerSpec, QuerySpec
from kvframe.contract.errors import BackendError, SpecError
from kvframe.planning.layer_specs import with_entries

QUERY = QuerySpec(num_heads=4, head_size=8, scale=1.0)


@attrs.frozen(kw_only=True)
class KeySpec(FullAttentionSpec):
    """Full attention that keeps the tokens of a prompt with the largest keys."""

    kind: ClassVar[str] = "largest_keys"
    budget: Any = 6
    wrong: str = ""

    @property
    def prompt_budget(self) -> Any:
        return self.budget

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(window=3) if self.wrong == "mask" else AttentionMask()

    def live_ranges(self, n: int) -> tuple[tuple[int, int], ...]:
        first = max(0, n - 2) if self.wrong == "mask" else 0
        return ((first, n),) if first < n else ()

    @property
    def entries(self) -> Mapping[str, KVCacheSpec]:
        tensors = {
            "": {},
            "entry": {"means": (4, 8)},
            "tensor": {"queries": (4, 8)},
            "shape": {"query": (2, 8)},
        }.get(self.wrong, {})
        name = "means" if self.wrong == "entry" else "query"
        return {name: TokenEntriesSpec(block_size=self.block_size, tensors=tensors)} if tensors else {}

    def choose_kept(self, layer: LayerSpec, num_kept: int, state: Any, entries: Any) -> torch.Tensor:
        sizes = state["k"].norm(dim=-1)
        if self.wrong == "together":
            sizes = sizes.mean(1, keepdim=True).expand_as(sizes)
        if self.wrong == "rounded":
            sizes = torch.exp(-8 * sizes)
        if self.wrong == "random":
            sizes = torch.rand_like(sizes)
        if self.wrong == "writes":
            state["k"].zero_()
        if self.wrong == "values":
            sizes = sizes + state["v"].flatten(1).norm(dim=-1, keepdim=True)
        return sizes.T.topk(num_kept).indices


def key_spec(**options: Any) -> KeySpec:
    return KeySpec(block_size=4, num_kv_heads=2, head_size=8, **options)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "6"])
def test_a_budget_is_a_number_of_tokens(budget: Any) -> None:
    with pytest.raises(SpecError, match=r"prompt_budget must be a whole number of at least 1, or None"):
        [*with_entries(LayerSpec(name="a", spec=key_spec(budget=budget), query=QUERY), frozenset())]


@pytest.mark.parametrize(
    ("wrong", "query", "sentence"),
    [
        ("mask", {}, "whose queries see all earlier tokens"),
        ("entry", {}, "has the entry 'means' of"),
        ("tensor", {}, r"has the entry 'query' of \['queries'\]"),
        ("shape", {}, r"of one tensor 'query' \[block_size, \*\(4, 8\)\]"),
        ("", {"choice": {"max_chosen": 4}}, "its queries read keys by position"),
        ("", {"alibi_slopes": (0.5,) * 4}, "its queries read keys by position"),
        ("", {"relative_bias": {"num_buckets": 8, "max_distance": 16}}, "its queries read keys by position"),
        ("", {"first_token": 1}, "its queries read keys by position"),
    ],
)
def test_only_attention_to_all_earlier_tokens_gives_some_up(
    wrong: str, query: Mapping[str, Any], sentence: str
) -> None:
    layer = LayerSpec(
        name="a", spec=key_spec(wrong=wrong), query=QuerySpec(num_heads=4, head_size=8, scale=1.0, **query)
    )
    with pytest.raises(SpecError, match=sentence):
        [*with_entries(layer, frozenset())]


def test_another_format_is_refused() -> None:
    registry = load_plugins().registry
    spec = key_spec().in_format(registry.formats.load("fp8_token_head")())
    with pytest.raises(SpecError, match="its tokens are moved in the plain format"):
        [*with_entries(LayerSpec(name="a", spec=spec, query=QUERY), frozenset())]


def test_a_host_with_pages_of_its_own_refuses_it() -> None:
    with pytest.raises(BackendError, match="the host would keep their pages"):
        Layers.on_host_pages(
            [LayerSpec(name="a", spec=key_spec(), query=QUERY)],
            Stack.from_mapping({}),
            load_plugins().registry,
            torch.device("cpu"),
        )


def test_an_entry_without_a_live_token_is_empty_in_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    group = UnfinishedGroupSpec(block_size=4, group=4, tensors={"query": (4, 8)})
    monkeypatch.setattr(KeySpec, "entries", {"query": group})
    shapes = []

    def choose(spec: Any, layer: LayerSpec, num_kept: int, state: Any, entries: Any) -> torch.Tensor:
        shapes.append(tuple(entries["query"]["query"].shape))
        return torch.arange(num_kept).expand(2, num_kept)

    monkeypatch.setattr(KeySpec, "choose_kept", choose)
    layers = [*with_entries(LayerSpec(name="a", spec=key_spec(), query=QUERY), frozenset())]
    grouping = group_layers(layers)
    plan = plan_cache(grouping, memory_bytes=1 << 20, max_model_len=16, max_num_batched_tokens=16)
    views = KVCacheStorage(plan, grouping, torch.device("cpu")).views
    blocks = [[1, 2] if layer == "a" else [0, 3] for group in grouping.groups for layer in group.layers[:1]]
    KeptTokens(layers, grouping, views)(8, blocks, {grouping.group_of("a").index: [4, 5]})
    assert [(0, 4, 8)] == shapes


def test_a_right_choice_passes_the_kit() -> None:
    check_kept(key_spec())
    check_kept(key_spec(budget=1), num_tokens=40)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("together", "KV head 0 chooses other tokens if other heads"),
        ("values", "KV head 0 chooses other tokens if other heads"),
        ("rounded", r"chooses \d+ other tokens of 6 in float32 than in float64, of keys about 8 in size"),
        ("random", "chooses other tokens if it is asked again"),
        ("writes", "writes to 'k'"),
    ],
)
def test_the_kit_finds_a_wrong_choice(wrong: str, sentence: str) -> None:
    with pytest.raises(ConformanceError, match=sentence):
        check_kept(key_spec(wrong=wrong))

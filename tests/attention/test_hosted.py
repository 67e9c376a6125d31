"""Layers in another serving engine: its pages and its batches, on the backends that a stack chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from kvframe_testing.case import Request
from kvframe_testing.metadata import make_metadata

from kvframe import FullAttentionSpec, Layers, Registry, Stack, load_plugins
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.config.options import ModelOptions
from kvframe.contract import (
    BackendError,
    CommonAttentionMetadata,
    KVCacheSpec,
    LayerSpec,
    NotReplayableError,
    QuerySpec,
    RelativeBias,
)
from tests.attention.capturable import CapturableReference
from tests.support.plugins import plugin

BLOCK_SIZE, NUM_BLOCKS = 4, 64
CPU = torch.device("cpu")
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=8, dtype="float32")
QUERY = QuerySpec(num_heads=4, head_size=8, scale=0.5)
PROMPTS = [Request(0, 9), Request(0, 1), Request(0, 6)]
DECODES = [Request(9, 1), Request(1, 1), Request(6, 1)]
LATER = [Request(10, 1), Request(2, 1), Request(7, 1)]


@pytest.fixture
def registry() -> Registry:
    return load_plugins().registry


def layer(name: str, spec: KVCacheSpec = SPEC, **query: Any) -> LayerSpec:
    return LayerSpec(name=name, spec=spec, query=attrs.evolve(QUERY, **query))


def stack(*rules: Mapping[str, Any]) -> Stack:
    return Stack.from_mapping({"rules": [{"layers": "*", **rule} for rule in rules]})


def batch(requests: Sequence[Request], *, is_bound: bool = True) -> CommonAttentionMetadata:
    """Return a batch as another host makes it: a padded token without a slot, and upper bounds of lengths."""
    made = make_metadata(requests, BLOCK_SIZE)
    table = torch.arange(1, 1 + 3 * 16, dtype=torch.int32).view(3, 16)
    lens = made.seq_lens_cpu.long()
    rows = torch.repeat_interleave(torch.arange(3), made.query_start_loc_cpu.diff())
    positions = torch.cat([torch.arange(each.num_computed, each.seq_len) for each in requests])
    slots = table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    changes: dict[str, Any] = {"block_table": table, "slot_mapping": torch.cat([slots, torch.tensor([-1])])}
    if is_bound:
        changes |= {"seq_lens_cpu": (lens + 2).int(), "max_seq_len": int(lens.max()) + 2, "exact_lens": False}
    return attrs.evolve(made, generating_indices=None, generating_indices_cpu=None, **changes)


def memory() -> dict[str, torch.Tensor]:
    """Return pages of keys and values in one tensor, heads first, as another host has them."""
    pages = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, 16), float("nan"))
    return {name: pages[..., place].transpose(1, 2) for name, place in (("k", slice(8)), ("v", slice(8, 16)))}


def draw(metadata: CommonAttentionMetadata, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = metadata.slot_mapping.shape[0]
    query, key, value = (torch.randn(num_tokens, heads, 8, generator=generator) for heads in (4, 2, 2))
    return query, key, value


def expected(
    spec: LayerSpec, query: torch.Tensor, kv_cache: Mapping[str, torch.Tensor], metadata: CommonAttentionMetadata
) -> torch.Tensor:
    exact = attrs.evolve(metadata, seq_lens_cpu=metadata.seq_lens)
    return TorchReferenceBackend([spec], CPU).attend(spec, query, kv_cache, exact)[:-1]


def test_prompts_and_decodes_are_computed_in_the_hosts_pages_into_its_output(registry: Registry) -> None:
    hosted = Layers.on_host_pages([layer("a"), layer("b")], stack({"backend": "torch"}), registry, CPU)
    caches = {name: memory() for name in "ab"}
    for seed, requests in enumerate((PROMPTS, DECODES)):
        metadata = batch(requests)
        step = hosted.begin_step([metadata])
        for name, kv_cache in caches.items():
            query, key, value = draw(metadata, seed)
            hosted.write(step, name, key, value, kv_cache)
            out = torch.full_like(query, 7)
            assert out is hosted.attend(step, name, query, kv_cache, out=out)
            assert torch.isfinite(out[:-1]).all()
            torch.testing.assert_close(out[:-1], expected(layer(name), query, kv_cache, metadata))
    assert ["kvframe-torch:torch"] * 2 == [choice.backend for choice in hosted.choices]


def test_several_steps_may_begin_before_the_first_is_computed(registry: Registry) -> None:
    hosted = Layers.on_host_pages([layer("a")], stack({"backend": "torch"}), registry, CPU)
    kv_cache, batches = memory(), [batch(PROMPTS), batch(DECODES)]
    steps = [hosted.begin_step([each]) for each in batches]
    for seed, (step, metadata) in enumerate(zip(steps, batches, strict=True)):
        query, key, value = draw(metadata, seed)
        hosted.write(step, "a", key, value, kv_cache)
        found = hosted.attend(step, "a", query, kv_cache)[:-1]
        torch.testing.assert_close(found, expected(layer("a"), query, kv_cache, metadata))


def test_layers_of_one_group_of_the_host_may_have_different_backends_and_masks(registry: Registry) -> None:
    window = registry.specs.load("sliding_window")(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=8, dtype="float32", window=3
    )
    layers = [layer("full"), layer("windowed", window), layer("capped", soft_cap=2.0)]
    rules = [{"backend": "torch"}, {"layers": "capped", "backend": "torch_reference"}]
    hosted = Layers.on_host_pages(layers, stack(*rules), registry, CPU)
    assert ["kvframe-torch:torch", "kvframe-torch:torch", "kvframe:torch_reference"] == [
        choice.backend for choice in hosted.choices
    ]
    metadata = batch(PROMPTS)
    step = hosted.begin_step([metadata])
    query, key, value = draw(metadata, 1)
    found = {}
    for each in layers:
        kv_cache = memory()
        hosted.write(step, each.name, key, value, kv_cache)
        found[each.name] = hosted.attend(step, each.name, query, kv_cache)[:-1]
        torch.testing.assert_close(found[each.name], expected(each, query, kv_cache, metadata))
    assert not torch.allclose(found["full"], found["windowed"])
    assert not torch.allclose(found["full"], found["capped"])


def test_a_layer_that_shares_a_cache_writes_nothing(registry: Registry) -> None:
    sharing = attrs.evolve(layer("b"), shares_with="a")
    hosted = Layers.on_host_pages([layer("a"), sharing], stack({"backend": "torch"}), registry, CPU)
    metadata, kv_cache = batch(PROMPTS), memory()
    query, key, value = draw(metadata, 1)
    step = hosted.begin_step([metadata])
    hosted.write(step, "a", key, value, kv_cache)
    before = kv_cache["k"].clone()
    hosted.write(step, "b", 2 * key, value, kv_cache)
    assert torch.equal(before.nan_to_num(), kv_cache["k"].nan_to_num())
    first, second = (hosted.attend(step, name, query, kv_cache)[:-1] for name in "ab")
    assert torch.equal(first, second)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_skipped_layer_computes_the_tokens_that_generate(registry: Registry, is_elsewhere: bool) -> None:
    """The layer whose cache it reads may be served elsewhere."""
    sharing = attrs.evolve(layer("b"), shares_with="a")
    skipping = attrs.evolve(stack({"backend": "torch"}), model=ModelOptions(prefill_skipping="decode_only"))
    layers, owners = ([sharing], [layer("a")]) if is_elsewhere else ([layer("a"), sharing], [])
    hosted = Layers.on_host_pages(layers, skipping, registry, CPU, skipped=["b"], owners=owners)
    keeping = Layers.on_host_pages([layer("a")], stack({"backend": "torch"}), registry, CPU)
    last = torch.tensor([8, 9, 15])
    metadata, kv_cache = batch(PROMPTS), memory()
    query, key, value = draw(metadata, 1)
    keeping.write(keeping.begin_step([metadata]), "a", key, value, kv_cache)
    step = hosted.begin_step(
        [attrs.evolve(metadata, generating_indices=last, generating_indices_cpu=last, num_generating=3)]
    )
    hosted.write(step, "b", 2 * key, value, kv_cache)  # it writes nothing
    found = hosted.attend(step, "b", query[last], kv_cache)
    torch.testing.assert_close(found, expected(sharing, query, kv_cache, metadata)[last])
    with pytest.raises(BackendError, match="called with 17 query rows, and its wrapper chain leaves 3"):
        hosted.attend(step, "b", query, kv_cache)


def test_a_captured_step_is_replayed_in_the_same_tensors() -> None:
    registry = load_plugins(plugins=[plugin("captured", backends={"own": CapturableReference})]).registry
    hosted = Layers.on_host_pages([layer("a")], stack({"backend": "own"}), registry, CPU)
    first, second = (
        attrs.evolve(batch(each, is_bound=False), static_shapes=True, max_seq_len=64) for each in (DECODES, LATER)
    )
    step = hosted.capture_step([first])
    (read,) = step.groups
    addresses = [read.metadata.block_table.data_ptr(), read.metadata.seq_lens.data_ptr()]
    kv_cache = {name: torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, 8) for name in "kv"}
    for metadata in (first, second):
        hosted.replay_step(step, [metadata])
        query, key, value = draw(metadata, 3)
        hosted.write(step, "a", key, value, kv_cache)
        found = hosted.attend(step, "a", query, kv_cache)[:-1]
        torch.testing.assert_close(found, expected(layer("a"), query, kv_cache, metadata))
        assert addresses == [read.metadata.block_table.data_ptr(), read.metadata.seq_lens.data_ptr()]
    with pytest.raises(NotReplayableError):
        hosted.replay_step(step, [attrs.evolve(batch(PROMPTS, is_bound=False), static_shapes=True)])


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_layer_that_no_backend_serves_is_refused_when_it_is_set_up(registry: Registry) -> None:
    with pytest.raises(BackendError, match="reads the state tensors latent, not k, v"):
        Layers.on_host_pages([layer("a", soft_cap=1.0)], stack({"backend": "mla"}), registry, CPU)


def test_an_unknown_layer_is_named_with_those_that_exist(registry: Registry) -> None:
    hosted = Layers.on_host_pages([layer("a")], stack({"backend": "torch"}), registry, CPU)
    step = hosted.begin_step([batch(PROMPTS)])
    with pytest.raises(BackendError, match=r"no layer 'b' here; there are 'a'"):
        hosted.attend(step, "b", torch.zeros(17, 4, 8), memory())


def test_a_step_that_was_not_captured_is_not_replayed(registry: Registry) -> None:
    hosted = Layers.on_host_pages([layer("a")], stack({"backend": "torch"}), registry, CPU)
    with pytest.raises(NotReplayableError, match="was not captured"):
        hosted.replay_step(hosted.begin_step([batch(PROMPTS)]), [batch(PROMPTS)])


def test_a_batch_with_blocks_of_another_size_is_refused(registry: Registry) -> None:
    hosted = Layers.on_host_pages([layer("a")], stack({"backend": "torch"}), registry, CPU)
    with pytest.raises(BackendError, match="blocks of 8 tokens, and the layers' specs have 4"):
        hosted.begin_step([attrs.evolve(batch(PROMPTS), block_size=8)])


def test_a_layer_that_does_not_attend_is_refused(registry: Registry) -> None:
    keeping = LayerSpec(name="state", spec=SPEC, query=None)
    with pytest.raises(BackendError, match="'state' cannot be hosted"):
        Layers.on_host_pages([layer("a"), keeping], stack({"backend": "torch"}), registry, CPU)


@attrs.frozen(kw_only=True)
class IndexedSpec(FullAttentionSpec):
    """Keeps an index beside keys and values."""

    kind = "indexed"

    @property
    def entries(self) -> Mapping[str, KVCacheSpec]:
        return {"index": SPEC}


def test_a_layer_with_entries_is_refused_because_the_host_has_no_pages_for_them(registry: Registry) -> None:
    indexed = IndexedSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=8, dtype="float32")
    with pytest.raises(BackendError, match="'a' cannot be hosted: its type 'indexed' has inputs, or entries"):
        Layers.on_host_pages([layer("a", indexed)], stack({"backend": "torch"}), registry, CPU)


def test_a_layer_without_its_bias_is_refused_until_it_is_bound(registry: Registry) -> None:
    bias = RelativeBias(num_buckets=8, max_distance=16, bidirectional=False)
    hosted = Layers.on_host_pages([layer("a", relative_bias=bias)], stack({"backend": "torch"}), registry, CPU)
    metadata, kv_cache = batch(PROMPTS), memory()
    query, key, value = draw(metadata, 1)
    for begin in (hosted.begin_step, hosted.capture_step):
        with pytest.raises(
            BackendError, match="'a' need learned tensors, and the model bound none; it has to call bind"
        ):
            begin([metadata])
    hosted["a"].bind({"relative_bias": torch.randn(8, 4)})
    step = hosted.begin_step([metadata])
    hosted.write(step, "a", key, value, kv_cache)
    assert torch.isfinite(hosted.attend(step, "a", query, kv_cache)[:-1]).all()


def test_a_batch_that_is_not_causal_as_a_whole_is_refused(registry: Registry) -> None:
    hosted = Layers.on_host_pages([layer("a")], stack({"backend": "torch"}), registry, CPU)
    causal: Any = torch.tensor([True, False, True])
    with pytest.raises(BackendError, match="as a whole") as caught:
        hosted.begin_step([attrs.evolve(batch(PROMPTS), causal=causal)])
    assert "causal_per_request" == caught.value.code

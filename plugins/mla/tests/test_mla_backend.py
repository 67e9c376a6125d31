"""The backend gives the output of attention over expanded latents, in both forms, within bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvframe_mla import MLASpec, backend, dense_batches
from kvframe_mla.backend import MLABackend
from kvframe_mla.cost import Cost
from kvframe_mla.dense_batches import ABSORBED, EXPANDED, SQUARE
from kvframe_mla.testing import Latents
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases, make_layer
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import make_metadata, on_device
from kvframe_testing.refusals import find_refusals
from kvframe_testing.runs import make_runs
from kvframe_testing.sample import sample
from kvframe_testing.serving import check_run
from kvframe_testing.staging import check_staging
from kvframe_testing.suites import BackendTests
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvframe import Layers, Stack, load_plugins
from kvframe.contract import BackendError, LayerSpec, QuerySpec, Slots

CASES = make_cases(MLABackend.capabilities, form=Latents())
FEW = sample(CASES)
RUNS = make_runs(MLABackend.capabilities, form=Latents())


class TestMLA(BackendTests):
    backend = "mla"
    run_traits = ("head_size",)
    writes_out = True


def test_what_a_step_needs_is_in_its_one_copy_and_nobody_waits() -> None:
    check_staging(MLABackend)


@pytest.mark.gpu
def test_it_computes_the_grid_on_a_gpu() -> None:
    for case in CASES:
        check_backend(MLABackend, case, "cuda")
    for run in RUNS:
        check_run(MLABackend, run, "cuda")


@pytest.mark.parametrize("form", [True, False], ids=["absorbed", "expanded"])
def test_each_form_alone_computes_some_of_the_grid(form: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cost, "absorbs", lambda self, num_queries, num_tokens: np.full(len(num_queries), form))
    for case in FEW:
        check_backend(MLABackend, case)


@pytest.mark.parametrize(
    ("limit", "step"), [(1, 3), (40, 3), *(pytest.param(limit, 1, marks=pytest.mark.whole) for limit in (1, 40, 1000))]
)
def test_small_limits_cut_the_work_and_change_nothing(limit: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in {
        dense_batches: ("MAX_SCORES", "MAX_BATCH_TOKENS"),
        backend: ("MAX_EXPANDED", "MAX_MASK"),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, limit)
    monkeypatch.setattr(dense_batches, "SMALL_PAGES_TOKENS", 1)
    cases = [case for case in CASES if "block=17" in case.name or "latent" in case.name]
    for case in cases[::step]:
        check_backend(MLABackend, case)


class _WithoutRope(MLABackend):
    def write_kv(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write_kv(key, torch.zeros_like(value), kv_cache, slots)


class _WithTransposedUp(MLABackend):
    def bind(self, layer: Any, parameters: Any) -> None:
        super().bind(layer, {"kv_up": parameters["kv_up"].flip(0)})


@pytest.mark.parametrize("wrong", [_WithoutRope, _WithTransposedUp])
def test_the_grid_sees_mistakes(wrong: type[MLABackend]) -> None:
    with pytest.raises(ConformanceError, match="queries are wrong"):
        check_backend(wrong, CASES[0])


def test_the_backends_of_keys_and_values_refuse_latents_and_it_refuses_these() -> None:
    registry = load_plugins().registry
    latents = make_layer(MLABackend.capabilities, Latents())
    codes = {
        name: [refusal.code for refusal in find_refusals(registry.backends.load(name).capabilities, latents, "cpu")]
        for name in ("torch", "torch_reference", "mla")
    }
    assert {"torch": ["state"], "torch_reference": ["state"], "mla": []} == codes
    keys_and_values = make_layer(MLABackend.capabilities)
    assert ["state"] == [refusal.code for refusal in find_refusals(MLABackend.capabilities, keys_and_values, "cpu")]


# --- the choice of form -----------------------------------------------------------------------------------------------

DEEPSEEK_V3 = {"latent_size": 512, "rope_size": 64, "head_size_v": 128}


def counted(num_queries: int, num_tokens: int) -> tuple[int, int]:
    """Return the multiply-adds per head of absorbed and of expanded attention, with DeepSeek-V3's sizes, one by one."""
    pairs = sum(num_tokens - num_queries + index + 1 for index in range(num_queries))
    absorbed = num_queries * (128 * 512) + pairs * (512 + 64) + pairs * 512 + num_queries * (512 * 128)
    expanded = num_tokens * 512 * (128 + 128) + pairs * (128 + 64) + pairs * 128
    return absorbed, expanded


@pytest.mark.parametrize("num_queries", [1, 2, 100, 145, 146, 147, 170, 171, 4096])
def test_the_cheaper_form_is_taken(num_queries: int) -> None:
    cost = Cost.of(512, 128, 128)
    lengths = [num_queries + context for context in (0, 1, 30, 1000, 8000, 131_072)]
    expected = [absorbed < expanded for absorbed, expanded in (counted(num_queries, length) for length in lengths)]
    absorbed_rows = cost.absorbs(np.full(len(lengths), num_queries), np.array(lengths))
    assert expected == absorbed_rows.tolist()


def test_up_to_170_queries_of_deepseek_v3_are_absorbed_on_a_long_context() -> None:
    queries = np.arange(1, 400)
    absorbed = Cost.of(512, 128, 128).absorbs(queries, np.full_like(queries, 1 << 30))
    assert 170 == absorbed.sum() == np.flatnonzero(~absorbed)[0]


def layer(num_heads: int = 4, **options: Any) -> LayerSpec:
    sizes = {"latent_size": 16, "rope_size": 4, "head_size_v": 8, **options}
    return LayerSpec(
        name="layer",
        spec=MLASpec(block_size=4, **sizes),
        query=QuerySpec(num_heads=num_heads, head_size=8 + sizes["rope_size"], scale=0.25),
    )


def forms(requests: list[Request]) -> list[int]:
    builder = MLABackend([layer()], torch.device("cpu")).make_builder()
    return [dense.form for dense in builder.build(make_metadata(requests, 4))]


def test_decodes_are_absorbed_and_prompts_are_expanded() -> None:
    assert [ABSORBED] == forms([Request(40, 1), Request(30, 1)])
    assert [SQUARE] == forms([Request(0, 20), Request(0, 17)])
    assert [EXPANDED] == forms([Request(4, 20)])
    assert [ABSORBED, SQUARE, EXPANDED] == forms([Request(0, 20), Request(40, 1), Request(4, 20)])


@pytest.mark.parametrize("num_reqs", [1, 7, 64])
def test_the_number_of_dense_batches_does_not_grow_with_the_requests(num_reqs: int) -> None:
    assert [ABSORBED, SQUARE] == forms([*[Request(100, 1)] * num_reqs, *[Request(0, 30)] * num_reqs])


def test_building_never_waits_for_the_device() -> None:
    requests = [Request(40, 1), Request(0, 19), Request(23, 7), Request(16, 1), Request(0, 1), Request(4, 0, 0)]
    builder = MLABackend([layer()], torch.device("cpu")).make_builder()
    assert 2 < len(builder.build(on_device(make_metadata(requests, 4))))


def test_a_step_without_tokens_gives_zeros() -> None:
    served = MLABackend([layer()], torch.device("cpu"))
    served.bind(layer(), {"kv_up": torch.ones(4, 16, 16)})
    built = served.make_builder().build(make_metadata([Request(5, 0, 0), Request(3, 0, 0)], 4))
    output = served.attend(layer(), torch.ones(3, 4, 12), {"latent": torch.ones(9, 4, 20)}, built)
    assert ((3, 4, 8), 0) == (tuple(output.shape), output.abs().sum())


# --- memory -----------------------------------------------------------------------------------------------------------


class _Largest(TorchDispatchMode):
    """Records the most elements of any tensor that is created."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // 4 for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


def largest(request: Request, num_heads: int, with_lse: bool = False) -> Iterator[int]:
    """Yield the largest number of elements of a tensor in a step of one request."""
    served = MLABackend([layer(num_heads)], torch.device("cpu"))
    served.bind(layer(num_heads), {"kv_up": torch.ones(num_heads, 16, 16)})
    metadata = make_metadata([request], 4)
    cache = torch.ones(int(metadata.block_table.max()) + 1, 4, 20)
    query = torch.ones(request.num_new, num_heads, 12)
    built = served.make_builder().build(metadata)
    with _Largest() as mode:
        lse = torch.empty(query.shape[:2]) if with_lse else None
        served.attend(layer(num_heads), query, {"latent": cache.expand(-1, 4, 20)}, built, lse=lse)
    yield mode.num_elements


def test_a_decode_makes_no_keys_and_values() -> None:
    (largest_size,) = largest(Request(3999, 1), num_heads=16)
    cache = 4004 * 20
    assert cache == largest_size < 4000 * 16 * 12


def test_expanded_keys_exist_for_a_few_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_MASK", 100 * 4000)
    (all_at_once,) = largest(Request(3000, 1000), num_heads=64)
    assert 4000 * 64 * 16 == all_at_once
    monkeypatch.setattr(backend, "MAX_EXPANDED", 2 * 4000 * 12 * 4)
    (bounded,) = largest(Request(3000, 1000), num_heads=64)
    # The queries and outputs of the step remain, and the memory for four heads.
    assert max(1000 * 64 * 12, 4000 * 4 * 16) == bounded


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_mask_and_scores_exist_for_a_few_queries_at_a_time(with_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_MASK", 100 * 4000)
    (bounded,) = largest(Request(2000, 2000), 1, with_lse)
    assert bounded < 2000 * 4000 / 4


# --- a layer's parameters ---------------------------------------------------------------------------------------------


def test_latents_and_rotated_parts_lie_side_by_side() -> None:
    cache = torch.zeros(3, 4, 20)
    slots = Slots.at(torch.tensor([2, 1]), torch.tensor([3, 0]), 4)
    MLABackend([layer()], torch.device("cpu")).write_kv(
        torch.ones(2, 1, 16), torch.full((2, 1, 4), 2.0), {"latent": cache}, slots
    )
    expected = torch.tensor([1.0] * 16 + [2.0] * 4)
    assert torch.equal(expected, cache[2, 3])
    assert torch.equal(expected, cache[1, 0])
    assert 2 * expected.sum() == cache.sum()


@pytest.mark.parametrize(
    ("parameters", "problem"), [({}, "none"), ({"kv_up": torch.ones(4, 17, 16)}, r"{'kv_up': \(4, 17, 16\)}")]
)
def test_an_up_projection_that_does_not_fit_is_refused(parameters: dict[str, torch.Tensor], problem: str) -> None:
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": "mla"}]})
    hosted = Layers.on_host_pages([layer()], stack, load_plugins().registry, torch.device("cpu"))
    expected = rf"'layer' needs the learned tensor 'kv_up' of shape \(4, 16, 16\), and the model bound {problem};"
    with pytest.raises(BackendError, match=expected):
        hosted["layer"].bind(parameters)
    with pytest.raises(BackendError, match="'layer' need learned tensors, and the model bound none"):
        hosted.begin_step([make_metadata([Request(0, 3)], 4)])


def test_a_cache_in_fewer_bits_is_read_in_the_dtype_of_the_queries() -> None:
    case = next(case for case in CASES if case.stored_dtype == torch.bfloat16)
    assert isinstance(case, Case)
    check_backend(MLABackend, case)
    served = MLABackend([layer()], torch.device("cpu"))
    served.bind(layer(), {"kv_up": torch.ones(4, 16, 16)})
    built = served.make_builder().build(make_metadata([Request(9, 1), Request(0, 6)], 4))
    cache = torch.ones(9, 4, 20, dtype=torch.bfloat16)
    assert torch.float32 == served.attend(layer(), torch.ones(7, 4, 12), {"latent": cache}, built).dtype

"""The comparison with the attention that a type defines passes the examples, and finds the mistakes of a backend."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_testing.definitions import check_definition, find_wrong
from kvframe_testing.laws import ConformanceError

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract import BatchOrder, EntryStep, LayerSpec, QuerySpec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "by_content"
SIZES: Mapping[str, Any] = {"block_size": 8, "num_kv_heads": 2, "head_size": 16}
TYPES: Mapping[str, tuple[str, str, Mapping[str, int]]] = {
    "moba": ("MobaSpec", "MobaBackend", {"chunk": 4, "num_blocks": 2}),
    "native_sparse": ("NativeSparseSpec", "NativeSparseBackend", {"chunk": 4, "num_blocks": 2, "window": 6}),
    "compressive_memory": ("CompressiveMemorySpec", "CompressiveMemoryBackend", {"group": 8, "recent": 12}),
    "duo_attention": ("DuoSpec", "DuoBackend", {"num_full": 1, "window": 12, "num_first": 4}),
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, Any]]:
    """Return a function that gives the spec and the backend of an example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "compare", raising=False)

    def load(name: str) -> tuple[Any, Any]:
        spec_name, backend_name, options = TYPES[name]
        names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        return names[spec_name](**SIZES, **options), names[backend_name]

    return load


@pytest.mark.parametrize("name", TYPES)
def test_the_examples_compute_what_their_types_define(example: Callable[[str], tuple[Any, Any]], name: str) -> None:
    spec, backend_class = example(name)
    check_definition(backend_class, spec)


def shifted(read: Any) -> Any:
    return lambda step, *arguments: {name: tensor.roll(1, 0) for name, tensor in read(step, *arguments).items()}


def of_another_request(read: Any) -> Any:
    def wrong(step: EntryStep, request: int, *arguments: Any) -> Any:
        other = step.requests[0].request
        return read(step, other if step.tokens_per_entry > 1 else request, *arguments)

    return wrong


@pytest.mark.parametrize(
    ("name", "method", "mistake"),
    [
        ("moba", "read", shifted),
        ("moba", "read", of_another_request),
        ("native_sparse", "read", shifted),
        ("compressive_memory", "read", of_another_request),
        ("duo_attention", "read", shifted),
        ("duo_attention", "write", lambda write: lambda step, **entries: None),
        ("moba", "store", lambda store: lambda step, *arguments, **entries: None),
    ],
)
def test_a_mistake_shows(
    example: Callable[[str], tuple[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    method: str,
    mistake: Callable[[Any], Any],
) -> None:
    spec, backend_class = example(name)
    monkeypatch.setattr(EntryStep, method, mistake(getattr(EntryStep, method)))
    with pytest.raises(ConformanceError):
        check_definition(backend_class, spec)


def test_a_choice_with_one_block_less_shows(example: Callable[[str], tuple[Any, Any]]) -> None:
    spec, backend_class = example("moba")

    class Fewer(backend_class):  # type: ignore[misc,valid-type]
        def attend(self, layer: Any, *arguments: Any, **options: Any) -> Any:
            fewer = attrs.evolve(layer, spec=attrs.evolve(layer.spec, num_blocks=1))
            return super().attend(fewer, *arguments, **options)

    with pytest.raises(ConformanceError, match="differs from dense_attention"):
        check_definition(Fewer, spec)


def test_either_of_two_equal_choices_is_right_and_a_worse_one_is_not(
    example: Callable[[str], tuple[Any, Any]],
) -> None:
    spec, _ = example("moba")
    spec = attrs.evolve(spec, num_blocks=1)
    layer = LayerSpec(name="layer", spec=spec, query=QuerySpec(num_heads=2, head_size=16, scale=0.25))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(12, 2, 16, generator=generator) for _ in range(3))
    key[4:8] = key[:4]  # the last four queries read one of two blocks that are equally good

    def output(factor: float) -> torch.Tensor:
        other = key.double()
        other[4:8] *= factor
        return torch.as_tensor(spec.dense_attention(layer, query.double(), other, value.double(), {}))

    first, second = output(1 + 1e-9), output(1 - 1e-9)
    assert (first - second).norm(dim=2)[8:].min() > 0.1
    for right in (first, second):
        assert {} == find_wrong(layer, (query, key, value, {}), right, generator)
    assert {8, 9, 10, 11} == {*find_wrong(layer, (query, key, value, {}), (first + second) / 2, generator)}


def test_a_backend_without_the_kind_is_refused(example: Callable[[str], tuple[Any, Any]]) -> None:
    spec, _ = example("moba")
    with pytest.raises(ConformanceError, match="does not compute the attention that the type moba defines"):
        check_definition(TorchReferenceBackend, spec)


def test_inputs_reach_the_backend(example: Callable[[str], tuple[Any, Any]]) -> None:
    spec, backend_class = example("moba")

    @attrs.frozen(kw_only=True)
    class Gated(type(spec)):  # type: ignore[misc]
        def inputs(self, query: Any) -> Mapping[str, tuple[int, ...]]:
            return {"gate": (query.num_heads,)}

        def dense_attention(self, layer: Any, query: Any, key: Any, value: Any, inputs: Any) -> torch.Tensor:
            gated: torch.Tensor = super().dense_attention(layer, query, key, value, {}) * inputs["gate"][..., None]
            return gated

    class GatedBackend(backend_class):  # type: ignore[misc,valid-type]
        def attend(self, *arguments: Any, more: Any = None, **options: Any) -> Any:
            return super().attend(*arguments, more=more, **options) * more.inputs["gate"][..., None]

    gated = Gated(**attrs.asdict(spec, recurse=False))
    check_definition(GatedBackend, gated)
    with pytest.raises(ConformanceError, match="differs from dense_attention"):
        check_definition(backend_class, gated)


def test_a_backend_of_entries_asks_for_no_order(example: Callable[[str], tuple[Any, Any]]) -> None:
    """Entries are packed as the step is."""
    spec, backend_class = example("moba")

    class Ordered(backend_class):  # type: ignore[misc]
        def make_builder(self) -> Any:
            builder = super().make_builder()
            builder.batch_order = BatchOrder()
            return builder

    with pytest.raises(ConformanceError, match="reads entries, and its builder asks for an order of requests"):
        check_definition(Ordered, spec)

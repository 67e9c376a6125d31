"""The error of a step names the backend, builder or wrapper that raised, the layer, and the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import pytest
import torch

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import AttentionMetadataBuilder, KVCache
from kvframe.contract.capture import NotReplayableError
from kvframe.contract.errors import BackendError, KVFrameError, WrapperError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import LayerSpec
from tests.attention.attending import MIXED
from tests.engine.test_wrong_returns import Refreshing, bench_of, on
from tests.testing.wrong_wrappers import Wrong
from tests.testing.wrong_wrappers import bench_of as wrapped_bench

BOOM: list[BaseException] = [ValueError("boom")]


def explode(*_: Any) -> Any:
    raise BOOM[0]


class Attends(TorchReferenceBackend):
    def attend(self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **_: Any) -> torch.Tensor:
        output: torch.Tensor = explode()
        return output


class Writes(TorchReferenceBackend):
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        explode()


class Builds(Refreshing):
    def build(self, metadata: CommonAttentionMetadata) -> Any:
        return explode()


class BuildsTogether(Refreshing):
    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[Any]:
        found: list[Any] = explode()
        return found


class Refreshes(Refreshing):
    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        found: Mapping[str, Any] = explode()
        return found


class Finishes(Refreshing):
    def finish(self, built: Any) -> Any:
        return explode()


FAILING = {
    "attend": (Attends, "'layer 0': attend"),
    "write_kv": (Writes, "'layer 0': write_kv"),
    "build": (on(Builds), "'layer 0' and 1 others: its builder's build"),
    "build_together": (on(BuildsTogether), "'layer 0' and 1 others: its builder's build_together"),
    "refreshed_fields": (on(Refreshes), "'layer 0' and 1 others: its builder's refreshed_fields"),
    "finish": (on(Finishes), "'layer 0' and 1 others: its builder's finish"),
}


@pytest.mark.parametrize("kind", [ValueError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("method", FAILING)
def test_what_a_backend_raises_in_a_step_names_it_with_layer_and_line(method: str, kind: type[BaseException]) -> None:
    BOOM[0] = kind("boom")
    backend, where = FAILING[method]
    line = explode.__code__.co_firstlineno + 1
    with pytest.raises(BackendError) as failed:
        bench_of(backend, num_layers=2).run(MIXED)
    expected = rf"backend 'mine:mine', of layer {where}() failed in line {line} of '{__name__}': {kind.__name__}: boom"
    assert expected == str(failed.value)
    assert ("failed", BOOM[0]) == (failed.value.code, failed.value.__cause__)


@pytest.mark.parametrize("method", FAILING)
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), NotReplayableError("no"), torch.OutOfMemoryError("no"), BackendError("mine")],
    ids=repr,
)
def test_an_interrupt_and_what_a_graph_asks_for_pass_as_they_are(method: str, error: BaseException) -> None:
    BOOM[0] = error
    with pytest.raises(type(error)) as failed:
        bench_of(FAILING[method][0], num_layers=2).run(MIXED)
    assert error is failed.value


def test_what_builders_of_several_layers_raise_names_one_and_the_number_of_the_others() -> None:
    BOOM[0] = ValueError("boom")

    class OfAll(AttentionMetadataBuilder):
        def build(self, metadata: CommonAttentionMetadata) -> Any:
            raise AssertionError("the class builds for all")

        @classmethod
        def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[Any]:
            found: list[Any] = explode()
            return found

    with pytest.raises(BackendError, match="backend 'mine:mine', of layer 'layer 0' and 2 others: its builder's"):
        bench_of(on(OfAll), num_layers=3).run(MIXED)


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_what_a_wrapper_raises_in_a_step_names_it_with_its_layer(kind: type[BaseException]) -> None:
    BOOM[0] = kind("boom")
    Wrong.change = staticmethod(explode)
    expected = f"wrapper 'wrong', of the layer 'a', failed: {kind.__name__}: boom; "
    with pytest.raises(WrapperError, match=expected) as failed:
        wrapped_bench("torch").run(MIXED)
    assert "failed" == failed.value.code
    BOOM[0] = KVFrameError("as it is")
    with pytest.raises(KVFrameError, match=r"^as it is$"):
        wrapped_bench("torch").run(MIXED)

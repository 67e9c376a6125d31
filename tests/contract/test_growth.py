"""What a later version adds to the contract's base classes reaches the plugins that know it, and disturbs no others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import attrs
import pytest

from kvframe.contract import AttentionBackend, AttentionSpec, MetadataWrapper, PluginError
from kvframe.contract.growth import RESERVED, Growing


class Base(Growing, ABC):
    """A base class of a later version: the arguments ``later`` and ``last`` were added to its methods."""

    @abstractmethod
    def forward(self, layer: str, out: Any = None, later: int = 0, *, last: int = 0) -> Any:
        """Return what it was given."""

    @classmethod
    def build(cls, step: str, later: int = 0) -> Any:
        """Return what it was given."""
        return step, later

    def __call__(self, step: str, later: int = 0) -> Any:
        """Return what it was given."""
        return step, later

    def kvframe_later(self) -> str:
        """Return that the plugin does not implement it."""
        return "default"


class Older(Base):
    """Was written before."""

    def forward(self, layer: str, output: Any = None) -> Any:
        return layer, output

    @classmethod
    def build(cls, step: str) -> Any:
        return cls.__name__, step

    def __call__(self, step: str) -> Any:
        return step

    def later(self, own: int) -> int:
        return own + 1


def test_arguments_that_a_method_does_not_take_are_left_out() -> None:
    older = Older()
    assert ("layer", 1) == older.forward("layer", 1)
    assert ("layer", 1) == older.forward("layer", 1, 2, last=3)
    assert ("layer", None) == older.forward("layer", out=1, later=2, last=3)
    assert ("Older", "step") == older.build("step", later=2) == Older.build("step", 2)
    assert "step" == older("step", later=2)


def test_what_is_wrong_by_any_version_stays_an_error() -> None:
    with pytest.raises(TypeError, match="unknown"):
        Older().forward("layer", unknown=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'layer'"):
        Older().forward(later=2)  # type: ignore[call-arg]


def test_a_helper_of_a_plugin_is_its_own_and_a_later_method_has_its_default() -> None:
    assert 5 == Older().later(4)
    assert "default" == Older().kvframe_later()


def test_a_method_that_takes_everything_is_left_as_it_is() -> None:
    def forward(self: Any, layer: str, out: Any = None, later: int = 0, *, last: int = 0) -> Any:
        return layer, out, later, last

    def forward_any(self: Any, layer: str, **options: Any) -> Any:
        return layer, options

    newer = type("Newer", (Base,), {"forward": forward})
    assert vars(newer)["forward"] is forward
    assert ("layer", 1, 2, 3) == newer().forward("layer", 1, 2, last=3)
    any_version = type("AnyVersion", (Base,), {"forward": forward_any})
    assert vars(any_version)["forward"] is forward_any
    assert ("layer", {"later": 2}) == any_version().forward("layer", later=2)


def test_no_method_of_todays_contract_is_changed() -> None:
    class Backend(AttentionBackend):
        def attend(self, layer, query, kv_cache, metadata, **_):  # type: ignore[no-untyped-def]
            return query

    assert "attend" == vars(Backend)["attend"].__name__
    assert not hasattr(vars(Backend)["attend"], "__wrapped__")


def test_a_backend_need_not_take_what_it_does_not_declare() -> None:
    class Backend(AttentionBackend):
        def attend(self, layer, query, kv_cache, metadata):  # type: ignore[no-untyped-def,override]
            return query

    assert 3 == Backend((), None).attend(None, 3, {}, None, sinks=None, out=4)  # type: ignore[arg-type]


def test_specs_with_slots_are_fitted_and_extended_too() -> None:
    @attrs.frozen(kw_only=True)
    class Later(AttentionSpec, Growing):
        kind = "later"
        kvframe_later: int = 7

        def live_ranges(self, n: int, later: int = 0) -> tuple[tuple[int, int], ...]:
            return ()

    @attrs.frozen(kw_only=True)
    class Own(Later):
        kind = "own"
        own: int = 1

        def live_ranges(self, n: int) -> tuple[tuple[int, int], ...]:
            return ((0, n),)

    spec = Own(block_size=4, num_kv_heads=1, head_size=8, own=2)
    assert (((0, 3),), 7, 2) == (spec.live_ranges(3, later=1), spec.kvframe_later, spec.own)
    assert ((0, 3),) == attrs.evolve(spec, own=3).live_ranges(3, 1)


@pytest.mark.parametrize("base", [AttentionBackend, AttentionSpec, MetadataWrapper, Base])
def test_names_that_are_kept_for_later_versions_are_refused_where_a_class_defines_them(base: type) -> None:
    name = f"{RESERVED}tree"
    message = f"^Mine defines '{name}'; names that begin with 'kvframe_' are kept for later versions of the contract"
    for body in ({name: lambda self: None}, {name: 3}, {"__annotations__": {name: "int"}}):
        with pytest.raises(PluginError, match=message):
            type("Mine", (base,), dict(body))


def test_a_plugin_implements_a_later_method_of_its_kvframe() -> None:
    class Newer(Older):
        def kvframe_later(self) -> str:
            return "own"

    assert "own" == Newer().kvframe_later()

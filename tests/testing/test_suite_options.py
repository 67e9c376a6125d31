"""The test classes of the kit for a backend of another device: skipped without it, or run on a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import attrs
import pytest
from kvframe_testing.case import Case
from kvframe_testing.suites import BackendTests, chains_of

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.errors import UnknownNameError
from kvframe.loading.plugins import load_plugins


class OfAGpu(TorchReferenceBackend):
    """The reference, which says that it needs a GPU."""

    capabilities: ClassVar = attrs.evolve(TorchReferenceBackend.capabilities, devices=frozenset({"cuda"}))

    @classmethod
    def unusable_reason(cls) -> str | None:
        return "needs a CUDA device; torch sees none"


class Unusable(BackendTests):
    backend = OfAGpu
    device = "cuda"

    def keeps(self, case: Case) -> bool:
        is_of_a_run = " in step " in case.name
        return is_of_a_run or case.name in ("full-block=16-decode", "full-block=16-mixed", "window=5-block=16-mixed")


class OnAStandIn(Unusable):
    runs_on = "cpu"
    together = ()
    run_kinds = ("decodes",)


class Whole(OnAStandIn):
    always_whole = True


class OfSmallHeads(Whole):
    def keeps(self, case: Case) -> bool:
        return " in step " not in case.name or case.query.head_size == 64


def test_a_run_is_left_out_if_a_layer_of_it_is_not_kept() -> None:
    names = [
        check.name for check in OfSmallHeads().make_checks(whole=False).checks if check.name.startswith("run-head")
    ]
    assert names
    assert all(name.startswith("run-head_size=64") for name in names)


def test_a_backend_that_cannot_run_here_is_skipped_with_its_reason() -> None:
    assert "needs a CUDA device; torch sees none" == Unusable().why_not()


def test_a_backend_whose_library_is_missing_is_skipped_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = load_plugins().registry.backends.get("flash_attn")
    expected = f"backend 'flash_attn' needs {'; '.join([*claim.missing(), *claim.outdated()])}"
    monkeypatch.setattr(Unusable, "backend", "flash_attn")
    if claim.missing():
        assert expected == Unusable().why_not()
    monkeypatch.setattr(Unusable, "backend", "flash_atn")
    with pytest.raises(UnknownNameError, match="did you mean 'flash_attn'"):
        Unusable().why_not()


def names(suite: BackendTests) -> Iterator[str]:
    return (check.name for check in suite.make_checks(whole=False).checks if "run-" not in check.name)


def test_on_a_stand_in_the_cases_of_the_device_are_computed_on_another() -> None:
    assert OnAStandIn().why_not() is None
    checks = OnAStandIn().make_checks(whole=False).checks
    assert any(check.name == "window=5-block=16-mixed" for check in checks)
    next(check for check in checks if check.name == "window=5-block=16-mixed").run()


def test_a_class_may_compute_everything_in_usual_runs() -> None:
    all_names = {*names(Whole())}
    assert {"full-block=16-decode", "full-block=16-mixed", "full-block=16-decode-large_values"} <= all_names
    assert {*names(OnAStandIn())} < all_names


def test_chains_are_named_by_their_wrappers() -> None:
    (first, second) = chains_of(("decode_only",), ("decode_only", "chunked_local"))
    assert (["decode_only"], ["decode_only", "chunked_local"]) == tuple(
        [wrapper.name for wrapper in chain] for chain in (first, second)
    )

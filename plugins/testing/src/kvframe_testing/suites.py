"""Test classes for pytest: a plugin's tests are a subclass that names what it tests.

::

    from kvframe_testing.suites import BackendTests


    class TestMine(BackendTests):
        backend = "mine"

pytest then runs a sample of the kit's checks, a test for each, in which every feature that the backend declares occurs.
``pytest -m whole`` runs the rest of the checks of a backend, spec or format. A class without a check is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import pytest

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.event_publisher import EventPublisher
from kvframe.contract.eviction import EvictionPolicy
from kvframe.contract.formats import KVFormat
from kvframe.contract.page_store import PageStore
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.contract.wrapper import MetadataWrapper
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.selection.choice import WrapperChain
from kvframe_testing.case import Case
from kvframe_testing.checks import Check, Checks, make_checks
from kvframe_testing.laws import ConformanceError
from kvframe_testing.runs import TRAITS
from kvframe_testing.sample import TOGETHER
from kvframe_testing.spec_checks import BLOCK_SIZES, MAX_TOKENS

_WHOLE = "whole: all checks of the kit, where usual runs compute some of them"


class KitTests:
    """The base of the test classes: a test for each check.

    Attributes:
        kind: The kind of the part, in ``checks.MAKERS``.
        part: The attribute of a subclass that names the part: the registered name, or the class.
        choices: The attributes that are arguments of the function in ``checks.MAKERS``.
        always_whole: Whether usual runs compute all checks too.
    """

    kind: ClassVar[str]
    part: ClassVar[str]
    choices: ClassVar[Sequence[str]] = ("options",)
    always_whole: ClassVar[bool] = False

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the checks; ``whole`` asks for all of them."""
        name, part_class = self.find_part()
        choices = {choice: getattr(self, choice) for choice in self.choices}
        return make_checks(self.kind, part_class, name=name, whole=whole or self.always_whole, **choices)

    def find_part(self) -> tuple[str, Any]:
        """Return the part's registered name, empty for a class, and its class."""
        part = getattr(self, getattr(self, "part", ""), None)
        if part is None:
            raise ConformanceError(
                f"{type(self).__name__} does not say what it tests; derive it from BackendTests, SpecTests or the "
                "like, and name the part"
            )
        return (part, _registry().catalogues[self.kind].load(part)) if isinstance(part, str) else ("", part)

    def why_not(self) -> str | None:
        """Return why nothing can be checked on this machine, so that the tests are skipped; None if it can."""
        return None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each check; called by pytest for each method of the class."""
        if "kit_check" not in metafunc.fixturenames:
            return
        if reason := self.why_not():
            metafunc.parametrize("kit_check", [pytest.param(None, marks=pytest.mark.skip(reason=reason))], ids=["all"])
            return
        chosen_checks = self.make_checks(whole=False).checks
        tests = [pytest.param(check, id=check.name) for check in chosen_checks]
        # Most runs leave the rest out, so that it is not even made.
        expression = metafunc.config.option.markexpr
        if "whole" in expression and "not whole" not in expression:
            metafunc.config.addinivalue_line("markers", _WHOLE)
            names = {check.name for check in chosen_checks}
            rest = [check for check in self.make_checks(whole=True).checks if check.name not in names]
            tests += [pytest.param(check, id=check.name, marks=pytest.mark.whole) for check in rest]
        metafunc.parametrize("kit_check", tests)

    def test_conformance(self, kit_check: Check) -> None:
        """Run one check."""
        kit_check.run()


@cache
def _registry() -> Registry:
    """Return the installed plugins' parts; the plugins are loaded once for all test classes."""
    return load_plugins().registry


def chains_of(*names: Sequence[str]) -> tuple[WrapperChain, ...]:
    """Return chains of wrappers without options, each given by the registered names of its wrappers."""
    wrappers = _registry().wrappers
    return tuple(tuple(wrappers.load(name)() for name in chain) for chain in names)


class BackendTests(KitTests):
    """Tests of a backend.

    Attributes:
        backend: The registered name, or the class.
        device: Its device. If it is unusable there, the tests are skipped.
        runs_on: Where it runs in the tests; ``device`` unless given. ``"cpu"`` for a stand-in for a GPU's library.
        chains: Wrapper chains after which it is tested too.
        together: As for ``backend_checks``, like the attributes after it.
        run_traits: Traits of runs whose values occur.
        run_kinds: The kinds of runs; None for all.
        formats: The formats; None for all that are installed.
        writes_out: Whether it must write its output where the other host wants it.
    """

    kind, part = "backend", "backend"
    choices = (
        *("device", "runs_on", "chains", "formats", "keeps"),
        *("together", "run_traits", "run_kinds", "writes_out"),
    )
    backend: ClassVar[str | type[AttentionBackend]]
    device: ClassVar[str] = "cpu"
    runs_on: ClassVar[str | None] = None
    chains: ClassVar[Sequence[WrapperChain]] = ()
    together: ClassVar[Collection[tuple[str, str]]] = TOGETHER
    run_traits: ClassVar[Collection[str]] = TRAITS
    run_kinds: ClassVar[Collection[str] | None] = None
    formats: ClassVar[Sequence[KVFormat] | None] = None
    writes_out: ClassVar[bool] = False

    def keeps(self, case: Case) -> bool:
        """Return whether a case is tested, and a layer of a run. A backend that takes long for some overrides it."""
        return True

    def why_not(self) -> str | None:
        """Return why the backend cannot run on its device: a library or a device is missing."""
        if self.runs_on is not None:
            return None
        if isinstance(self.backend, str):
            claim = _registry().backends.get(self.backend)
            if lacking_libraries := [*claim.missing(), *claim.outdated()]:
                return f"backend {self.backend!r} needs {'; '.join(lacking_libraries)}"
        reason: str | None = self.find_part()[1].unusable_reason()
        return reason


class SpecTests(KitTests):
    """Tests of a cache spec.

    Attributes:
        spec: The registered name, or the class.
        options: Options with which it is tested; None for small whole numbers where it requires any.
        block_sizes: The block sizes with which it is tested.
        max_tokens: Positions up to this one are tested.
        num_refused: As for ``check_spec``.
    """

    kind, part, choices = "spec", "spec", ("options", "block_sizes", "max_tokens", "num_refused")
    spec: ClassVar[str | type[KVCacheSpec]]
    options: ClassVar[Sequence[Mapping[str, Any]] | None] = None
    block_sizes: ClassVar[Sequence[int]] = BLOCK_SIZES
    max_tokens: ClassVar[int] = MAX_TOKENS
    num_refused: ClassVar[int] = 0


class WrapperTests(KitTests):
    """Tests of a wrapper: its declarations, and attention after it, on every kind of layer.

    Attributes:
        wrapper: The registered name, or the class.
        options: The wrapper's options.
        layers: More layers that it can serve, by name, for which its declarations are checked.
    """

    kind, part, choices = "wrapper", "wrapper", ("options", "layers")
    wrapper: ClassVar[str | type[MetadataWrapper]]
    options: ClassVar[Mapping[str, Any]] = {}
    layers: ClassVar[Mapping[str, LayerSpec]] = {}


class FormatTests(KitTests):
    """Tests of a format, ``format``, with ``options``: the laws, and attention by every backend."""

    kind, part = "format", "format"
    format: ClassVar[str | type[KVFormat]]
    options: ClassVar[Mapping[str, Any]] = {}


class EvictionTests(KitTests):
    """Tests of an eviction policy, ``policy``, with ``options``: the laws in pools of several sizes."""

    kind, part = "eviction", "policy"
    policy: ClassVar[str | type[EvictionPolicy]]
    options: ClassVar[Mapping[str, Any]] = {}


class PageStoreTests(KitTests):
    """Tests of a page store, ``store``, with ``options``, in one process and in several. They write to the store."""

    kind, part = "page_store", "store"
    store: ClassVar[str | type[PageStore]]
    options: ClassVar[Mapping[str, Any]] = {}


class EventPublisherTests(KitTests):
    """Tests of an event publisher, ``publisher``, with ``options``. They publish invented events."""

    kind, part, choices = "event_publisher", "publisher", ("options", "read")
    publisher: ClassVar[str | type[EventPublisher]]
    options: ClassVar[Mapping[str, Any]] = {}

    def read(self, publisher: Any) -> Sequence[Mapping[str, Any]] | None:
        """Return the last events that an open publisher has sent so far, in order; None if that is not known."""
        return None

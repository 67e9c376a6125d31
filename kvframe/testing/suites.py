"""Test classes for pytest: a plugin's tests are a subclass that names what it tests.

::

    from kvframe.testing.suites import BackendTests


    class TestMine(BackendTests):
        backend = "mine"

pytest then runs a sample of the kit's checks, a test for each, in which every feature that the backend declares occurs.
``pytest -m whole`` runs the rest of the checks of a backend, spec or format. A class without a check is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import pytest

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.eviction import EvictionPolicy
from kvframe.contract.formats import KVFormat
from kvframe.contract.page_store import PageStore
from kvframe.contract.scheduling import SchedulingPolicy
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.contract.wrapper import MetadataWrapper
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.selection.chains import WrapperChain
from kvframe.testing.backend_checks import backend_checks
from kvframe.testing.case import Case
from kvframe.testing.checks import Check, Checks
from kvframe.testing.eviction import policy_checks
from kvframe.testing.formats import format_checks
from kvframe.testing.page_stores import page_store_checks
from kvframe.testing.runs import TRAITS
from kvframe.testing.sample import TOGETHER
from kvframe.testing.scheduling import scheduling_checks
from kvframe.testing.spec_checks import BLOCK_SIZES, MAX_TOKENS, spec_checks
from kvframe.testing.wrappers import wrapper_checks

_WHOLE = "whole: all checks of the kit, where usual runs compute some of them"


class KitTests:
    """The base of the test classes: a test for each check."""

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the checks; ``whole`` asks for all of them."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what it tests; derive it from BackendTests, SpecTests or the like"
        )

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
        chosen = self.make_checks(whole=False).checks
        tests = [pytest.param(check, id=check.name) for check in chosen]
        # Most runs leave the rest out, so that it is not even made.
        expression = metafunc.config.option.markexpr
        if "whole" in expression and "not whole" not in expression:
            metafunc.config.addinivalue_line("markers", _WHOLE)
            names = {check.name for check in chosen}
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


def find_part(part: Any, catalogue: str) -> tuple[str, Any]:
    """Return the name and the class of a part: a class, or a name that is registered in a catalogue."""
    if not isinstance(part, str):
        return "", part
    return part, _registry().catalogues[catalogue].load(part)


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
        always_whole: Whether usual runs compute all checks too.
        chains: Wrapper chains after which it is tested too.
        together: As for ``backend_checks``, like the attributes after it.
        run_traits: Traits of runs whose values occur.
        run_kinds: The kinds of runs; None for all.
        formats: The formats; None for all that are installed.
        writes_out: Whether it must write its output where the other host wants it.
    """

    backend: ClassVar[str | type[AttentionBackend]]
    device: ClassVar[str] = "cpu"
    runs_on: ClassVar[str | None] = None
    always_whole: ClassVar[bool] = False
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
            if lacking := [*claim.missing(), *claim.outdated()]:
                return f"backend {self.backend!r} needs {'; '.join(lacking)}"
        reason: str | None = find_part(self.backend, "backend")[1].unusable_reason()
        return reason

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the cases, those of other hosts, and the runs."""
        name, backend_class = find_part(self.backend, "backend")
        names = ("device", "runs_on", "chains", "formats", "keeps", "together", "run_traits", "run_kinds", "writes_out")
        choices = {name: getattr(self, name) for name in names}
        return backend_checks(backend_class, name=name, whole=whole or self.always_whole, **choices)


class SpecTests(KitTests):
    """Tests of a cache spec.

    Attributes:
        spec: The registered name, or the class.
        options: Options with which it is tested; None for small whole numbers where it requires any.
        block_sizes: The block sizes with which it is tested.
        max_tokens: Positions up to this one are tested.
        num_refused: As for ``check_spec``.
    """

    spec: ClassVar[str | type[KVCacheSpec]]
    options: ClassVar[Sequence[Mapping[str, Any]] | None] = None
    block_sizes: ClassVar[Sequence[int]] = BLOCK_SIZES
    max_tokens: ClassVar[int] = MAX_TOKENS
    num_refused: ClassVar[int] = 0

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the laws, a plan, and attention by every backend."""
        name, spec_class = find_part(self.spec, "spec")
        choices = {name: getattr(self, name) for name in ("block_sizes", "max_tokens", "num_refused")}
        return spec_checks(spec_class, self.options, name=name, whole=whole, **choices)


class OptionTests(KitTests):
    """Tests of a part with options, which the subclass names by its registered name or its class.

    Attributes:
        options: The options of the part.
    """

    options: ClassVar[Mapping[str, Any]] = {}

    def checks_of(self, part: Any, catalogue: str, make_checks: Callable[..., Checks], **choices: Any) -> Checks:
        """Return what ``make_checks`` makes of a part: a class, or a name that is registered in a catalogue."""
        name, part_class = find_part(part, catalogue)
        return make_checks(part_class, self.options, name=name, **choices)


class WrapperTests(OptionTests):
    """Tests of a wrapper.

    Attributes:
        wrapper: The registered name, or the class.
        layers: More layers that it can serve, by name, for which its declarations are checked.
    """

    wrapper: ClassVar[str | type[MetadataWrapper]]
    layers: ClassVar[Mapping[str, LayerSpec]] = {}

    def make_checks(self, *, whole: bool) -> Checks:
        """Return its declarations, and attention after it, on every kind of layer."""
        return self.checks_of(self.wrapper, "wrapper", wrapper_checks, layers=self.layers)


class FormatTests(OptionTests):
    """Tests of a format, ``format``: the registered name, or the class."""

    format: ClassVar[str | type[KVFormat]]

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the laws, and attention by every backend."""
        return self.checks_of(self.format, "format", format_checks, whole=whole)


class EvictionTests(OptionTests):
    """Tests of an eviction policy, ``policy``: the registered name, or the class."""

    policy: ClassVar[str | type[EvictionPolicy]]

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the laws in pools of several sizes."""
        return self.checks_of(self.policy, "eviction", policy_checks)


class SchedulingTests(OptionTests):
    """Tests of a scheduling policy, ``policy``: the registered name, or the class."""

    policy: ClassVar[str | type[SchedulingPolicy]]

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the laws for requests of several kinds."""
        return self.checks_of(self.policy, "scheduling", scheduling_checks)


class PageStoreTests(OptionTests):
    """Tests of a page store, ``store``: the registered name, or the class. They write to the store."""

    store: ClassVar[str | type[PageStore]]

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the laws, in one process and in several."""
        return self.checks_of(self.store, "page_store", page_store_checks, whole=whole)

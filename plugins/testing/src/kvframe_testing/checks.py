"""The checks of one part of a plugin, such as a backend, and the verdict on each of its features.

``MAKERS`` names the function that makes the checks of each kind of part. The test classes of ``suites`` and
``kvframe check`` both run these checks, and nothing else. Imports no torch.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs

from kvframe.config.options import make_with_options
from kvframe.contract.errors import KVFrameError, PluginError, UnknownNameError
from kvframe.contract.foreign import call, safe_reason
from kvframe.loading.registry import Registry
from kvframe_testing.laws import ConformanceError

if TYPE_CHECKING:
    from kvframe.contract.backend import AttentionBackend

MAKERS: Mapping[str, str] = {
    "backend": "kvframe_testing.backend_checks:backend_checks",
    "spec": "kvframe_testing.spec_checks:spec_checks",
    "wrapper": "kvframe_testing.wrappers:wrapper_checks",
    "format": "kvframe_testing.formats:format_checks",
    "eviction": "kvframe_testing.eviction:policy_checks",
    "scheduling": "kvframe.engine:scheduling_checks",
    "page_store": "kvframe_testing.page_stores:page_store_checks",
    "event_publisher": "kvframe_testing.event_publishers:publisher_checks",
    "model_adapter": "kvframe.engine:adapter_checks",
    "proposer": "kvframe.engine:proposer_checks",
    "logits_processor": "kvframe.engine:logits_processor_checks",
}
"""The import string of the function that returns the checks of a part, by kind."""

_KIT = Path(__file__).parent

Verdict = Literal["works", "refused", "wrong"]
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Check:
    """One check of a part.

    Attributes:
        name: Unique among the part's checks (``"full-block=16-decode"``).
        features: The features that the check uses, such as ``"windows"``.
        run: Raises ``ConformanceError`` if the part is wrong; returns the code of a refusal, or nothing.
    """

    name: str
    features: tuple[str, ...]
    run: Callable[[], str | None]


@attrs.frozen(kw_only=True)
class Checks:
    """All checks of one part.

    Attributes:
        part: The part, for people (``"backend 'mine'"``).
        checks: The checks, at least one, else ``ConformanceError``: the part would pass without one.
        refused: For each feature that the part refuses, the codes of the refusals.
        order: Features in the order in which verdicts list them; others follow as they occur.
    """

    part: str
    checks: tuple[Check, ...]
    refused: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    order: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not self.checks:
            codes = sorted({code for refused_codes in self.refused.values() for code in refused_codes})
            why = f": it refuses everything that could be checked ({', '.join(codes)})" if codes else ""
            raise ConformanceError(f"{self.part}: there is nothing to check{why}")
        names = [check.name for check in self.checks]
        assert len({*names}) == len(names), sorted(name for name in names if names.count(name) > 1)

    def only(self, pattern: str) -> Checks:
        """Return the checks whose name matches a pattern (``"full-*"``); raise ``UnknownNameError`` if none does."""
        matching_checks = tuple(check for check in self.checks if fnmatchcase(check.name, pattern))
        if not matching_checks:
            raise UnknownNameError("check", pattern, [check.name for check in self.checks], f"of {self.part}")
        return attrs.evolve(self, checks=matching_checks, refused={})


@attrs.frozen(kw_only=True)
class Row:
    """The verdict on one feature.

    Attributes:
        feature: Its name.
        verdict: Whether it works, is refused, or is wrong.
        codes: The codes of the refusals. For a feature that works except together with others, the names of these.
        num_passed: How many of its checks passed.
        num_checks: How many checks use it; none if it is refused.
    """

    feature: str
    verdict: Verdict
    codes: tuple[str, ...] = ()
    num_passed: int = 0
    num_checks: int = 0

    def __str__(self) -> str:
        if self.verdict == "refused":
            return f"refused: {', '.join(self.codes)}"
        return f"works, but not: {', '.join(self.codes)}" if self.codes and self.verdict == "works" else self.verdict


@attrs.frozen(kw_only=True)
class Report:
    """What was found about a part.

    Attributes:
        part: The part, for people.
        rows: The verdicts.
        failures: The sentence of each failed check, by the check's name, in order.
        errors: The exception of each, likewise.
        num_checks: How many checks were run.
    """

    part: str
    rows: tuple[Row, ...]
    failures: Mapping[str, str]
    errors: Mapping[str, Exception]
    num_checks: int


def make_checks(kind: str, part_class: Any, **choices: Any) -> Checks:
    """Return the checks of a part by the function of its kind in ``MAKERS``, which gets those choices that it takes."""
    module, _, function = MAKERS[kind].partition(":")
    make: Callable[..., Checks] = getattr(importlib.import_module(module), function)
    taken_names = choices.keys() & inspect.signature(make).parameters.keys()
    return make(part_class, **{name: choices[name] for name in taken_names})


def make_part(part: str, part_class: type[T], options: Mapping[str, Any] | None) -> T:
    """Return a part, made with options; raise ``ConformanceError`` with its name for people if it cannot be made."""
    try:
        return make_with_options(part_class, options or {})
    except (KVFrameError, ValueError) as error:
        raise ConformanceError(
            f"{part} cannot be made with {dict(options or {})}: {error}; give other options"
        ) from error


def find_backend(registry: Registry, name: str) -> type[AttentionBackend] | str:
    """Return a registered backend; if it cannot run here, the code of the reason."""
    try:
        backend_class: type[AttentionBackend] = registry.backends.load(name)
        reason = call("unusable_reason()", backend_class.unusable_reason)
    except PluginError:
        return "import"
    return "environment" if reason else backend_class


def run_checks(checks: Checks, on_progress: Callable[[int], None] = lambda num_done: None) -> Report:
    """Run all checks, and return what was found; an exception of the part counts as a failure.

    ``on_progress`` is called after each check with the number of checks that were run.
    """
    failures: dict[str, str] = {}
    errors: dict[str, Exception] = {}
    refusals: dict[str, str] = {}
    for num_done, check in enumerate(checks.checks, start=1):
        try:
            code = check.run()
            if code:
                refusals[check.name] = code
        except KVFrameError as error:
            failures[check.name], errors[check.name] = str(error), error
        except Exception as error:
            errors[check.name] = error
            failures[check.name] = f"{checks.part} on {check.name}: {type(error).__name__}: {safe_reason(error)}"
        on_progress(num_done)
    rows = _judge(checks, failures, refusals)
    return Report(part=checks.part, rows=rows, failures=failures, errors=errors, num_checks=len(checks.checks))


def source_of(part: type, error: Exception) -> str:
    """Return the file and line of a part where an error was raised, otherwise of its class; empty if unknown."""
    package = part.__module__.partition(".")[0]
    folder = Path(getattr(sys.modules.get(package), "__file__", None) or "").parent
    is_package = hasattr(sys.modules.get(package), "__path__")
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    for raised in reversed(chain):
        for frame in reversed(traceback.extract_tb(raised.__traceback__)):
            file = Path(frame.filename)
            is_own = folder in file.parents if is_package else file.stem == package
            if is_own and _KIT not in file.parents:
                return f"{file}:{frame.lineno}"
    try:
        return f"{inspect.getsourcefile(part)}:{inspect.getsourcelines(part)[1]}"
    except (OSError, TypeError):
        return ""


def _judge(checks: Checks, failures: Collection[str], refusals: Mapping[str, str]) -> tuple[Row, ...]:
    """Return a row for each feature.

    A check uses several features. Those that explain the failures are wrong: each feature none of whose checks passed,
    and of the others as few as leave no failed check unexplained.
    """
    using: dict[str, list[str]] = {}
    for check in checks.checks:
        for feature in check.features:
            using.setdefault(feature, []).append(check.name)
    failed = {feature: [name for name in names if name in failures] for feature, names in using.items()}
    wrong = _explain(using, failed, failures)
    features_of = {check.name: check.features for check in checks.checks}
    rows = []
    for feature, names in using.items():
        codes = tuple(dict.fromkeys(refusals[name] for name in names if name in refusals))
        num_failed, num_refused = len(failed[feature]), sum(name in refusals for name in names)
        row = Row(
            feature=feature,
            verdict="wrong" if feature in wrong else "works",
            num_passed=len(names) - num_failed - num_refused,
            num_checks=len(names) - num_refused,
        )
        if row.verdict == "works" and num_failed:
            blamed = {suspect for name in failed[feature] for suspect in features_of[name] if suspect in wrong}
            row = attrs.evolve(row, codes=tuple(suspect for suspect in using if suspect in blamed))
        elif num_refused == len(names):
            row = Row(feature=feature, verdict="refused", codes=codes)
        rows.append(row)
    refused_rows = [
        Row(feature=name, verdict="refused", codes=codes) for name, codes in checks.refused.items() if name not in using
    ]
    places = {feature: index for index, feature in enumerate(checks.order)}
    return tuple(sorted([*rows, *refused_rows], key=lambda row: places.get(row.feature, len(places))))


def _explain(
    using: Mapping[str, Sequence[str]], failed: Mapping[str, Sequence[str]], failures: Collection[str]
) -> set[str]:
    """Return the features that are wrong."""
    wrong: set[str] = set()
    unexplained = {*failures}
    while unexplained:

        def share(feature: str) -> tuple[float, int]:
            covered = len(unexplained.intersection(failed[feature]))
            return covered / len(using[feature]), covered

        worst = max(using, key=share)
        wrong.add(worst)
        unexplained.difference_update(failed[worst])
    # A feature that never worked is not known to work without the others.
    return wrong | {feature for feature, names in failed.items() if len(names) == len(using[feature])}
